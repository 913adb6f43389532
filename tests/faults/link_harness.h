/* Two rank processes for the link's tests: forked, watched, ended by their ids. A rank's function returns normally when
 * all went as it expected; must() ends the process otherwise and says why. */
#ifndef TESTS_FAULTS_LINK_HARNESS_H
#define TESTS_FAULTS_LINK_HARNESS_H

#include <sys/types.h>

#include "link/link.h"

typedef struct rank_args {
    td_link_options options; /* rank is set by the harness */
    int pipe[2];             /* from rank to parent: one byte a milestone; see tell() */
    const void *extra;
} rank_args;

typedef void rank_fn(const rank_args *args);

#define must(cond)          must_(__FILE__, __LINE__, #cond, NULL, cond)
#define must_err(cond, err) must_(__FILE__, __LINE__, #cond, (err), cond)
void must_(const char *file, int line, const char *text, const td_error *err, bool ok);

/* Options of a pair on a free port of this machine, with short limits. */
td_link_options pair_options(const char *transport);
int free_port(void);

/* Starts fn as this rank; its process id. */
pid_t start_rank(rank_fn *fn, rank_args *args, int rank);
/* Waits for it; its exit code, 128 + signal when killed, -1 when it had to be killed after limit_ms. */
int end_rank(pid_t pid, int limit_ms);

void args_init(rank_args *args, const char *transport);
void tell(const rank_args *args);        /* in a rank */
void hear(const rank_args *args, int n); /* in the parent: n milestones, or the test fails */

/* Both ranks; asserts that both end well within limit_ms. */
void run_pair(rank_args *args, rank_fn *rank0, rank_fn *rank1, int limit_ms);

/* In a rank: opens or ends the process. */
td_link *open_link(const rank_args *args);

#endif
