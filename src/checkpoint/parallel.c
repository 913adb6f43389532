#include "checkpoint/parallel.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct crew {
    atomic_int next;
    int n_jobs;
    td_job *job;
    void *user;
} crew;

typedef struct member {
    crew *crew;
    int worker;
} member;

static void *work(void *arg)
{
    member *m = arg;
    for (;;) {
        int job = atomic_fetch_add(&m->crew->next, 1);
        if (job >= m->crew->n_jobs) return NULL;
        m->crew->job(m->crew->user, m->worker, job);
    }
}

void td_parallel(int n_threads, int n_jobs, td_job *job, void *user)
{
    pthread_t threads[TD_PARALLEL_MAX];
    member members[TD_PARALLEL_MAX];
    crew c = { .n_jobs = n_jobs, .job = job, .user = user };
    int n_started = 0;
    if (n_threads > TD_PARALLEL_MAX) n_threads = TD_PARALLEL_MAX;
    for (int i = 1; i < n_threads && i < n_jobs; i++) {
        members[i] = (member){ &c, i };
        if (pthread_create(&threads[n_started], NULL, work, &members[i])) break;
        n_started++;
    }
    members[0] = (member){ &c, 0 };
    work(&members[0]);
    for (int i = 0; i < n_started; i++) pthread_join(threads[i], NULL);
}
