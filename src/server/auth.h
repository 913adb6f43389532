/* API keys: who may ask (docs/server.md "Keys"). Only digests are kept; labels are what logs and metrics show.
 * Internal. */
#ifndef TD_SERVER_AUTH_H
#define TD_SERVER_AUTH_H

#include "base/arena.h"

TD_BEGIN_C

#define TD_KEY_LABEL_CAP 65 /* 64 of letters, digits, '.', '_', '-' */
#define TD_KEYS_MAX      4096

typedef struct td_auth td_auth;

typedef enum td_auth_answer {
    TD_AUTH_OPEN, /* no keys are configured: everyone may */
    TD_AUTH_OK,   /* *label says who */
    TD_AUTH_REFUSED,
    TD_AUTH_CLOSED /* the key file is empty or malformed: nobody may until it is valid again */
} td_auth_answer;

/* keys[n_keys]: cli-1, ...; env: comma-separated, env-1, ... or NULL; file: path or NULL. Refuses empty keys, a file
 * that others may read, that holds no key or a malformed line. */
td_status td_auth_create(const char *const *keys, int n_keys, const char *env, const char *file, td_auth **out,
                         td_error *err);
void td_auth_destroy(td_auth *auth);

bool td_auth_is_open(const td_auth *auth); /* no source of keys at all */

/* key: from the request, NULL: none was sent. Looks at the file's time at most once a second. */
td_auth_answer td_auth_check(td_auth *auth, const char *key, char label[TD_KEY_LABEL_CAP]);

/* Reads the file now. */
void td_auth_reload(td_auth *auth);

/* The key in an Authorization header ("Bearer KEY", the scheme in any case) or, when that has none, in x-api-key; NULL:
 * neither. Points into the arguments. */
const char *td_auth_key_of(const char *authorization, const char *x_api_key);

TD_END_C
#endif
