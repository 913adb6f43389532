/* Status codes and error texts. A function that can fail returns td_status; where a person needs words, its last
 * argument is a td_error that the function which decides fills with td_fail(). Outputs are untouched after a
 * failure. */
#ifndef TD_BASE_STATUS_H
#define TD_BASE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TD_BEGIN_C extern "C" {
#define TD_END_C   }
#else
#define TD_BEGIN_C
#define TD_END_C
#endif

TD_BEGIN_C

typedef enum td_status {
    TD_OK = 0,
    TD_EINVAL = -1,       /* an argument or a setting is out of its range */
    TD_EFORMAT = -2,      /* a file, message or request is malformed */
    TD_ENOTFOUND = -3,    /* a file, tensor, key or route does not exist */
    TD_EUNSUPPORTED = -4, /* well formed, but not something this program does */
    TD_ENOMEM = -5,       /* memory: an allocation failed, or the plan does not fit */
    TD_EIO = -6,          /* the operating system refused a read, write or socket call */
    TD_ETIMEOUT = -7,     /* a limit of time ran out */
    TD_EPEER = -8,        /* the other rank is gone, late beyond its limit, or disagrees */
    TD_EFULL = -9,        /* a queue or pool has no room now; later it may */
    TD_ECANCELED = -10,   /* the client left or the server stops */
    TD_ECUDA = -11,       /* a CUDA call or kernel failed */
    TD_EAGAIN = -12       /* nothing ready yet: call again */
} td_status;

/* "out of memory", "wrong format", ...: a few words for logs; never NULL. */
const char *td_status_text(td_status status);

#define TD_ERROR_TEXT_CAP 1024

typedef struct td_error {
    td_status status;
    char text[TD_ERROR_TEXT_CAP]; /* one line of UTF-8 for a person; cut, never overrun */
} td_error;

/* Fills err (NULL is allowed: nothing is written) and returns status:  return td_fail(err, TD_EIO, "%s: ...", path); */
td_status td_fail(td_error *err, td_status status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "fmt: " before the text that is there; returns err->status. For a caller that knows which file or field it
 * was. */
td_status td_error_prefix(td_error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Our own invariants, also in release builds: prints file, line and text, then aborts. Never for input from outside. */
#define td_check(cond) ((cond) ? (void)0 : td_check_failed(__FILE__, __LINE__, #cond))
#ifdef __cplusplus
[[noreturn]]
#else
_Noreturn
#endif
void td_check_failed(const char *file, int line, const char *cond);

/* a * b and a + b into *out; TD_EINVAL on overflow (out untouched). For sizes that came from outside. */
td_status td_mul_size(size_t a, size_t b, size_t *out);
td_status td_add_size(size_t a, size_t b, size_t *out);

TD_END_C
#endif
