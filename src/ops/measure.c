/* See measure.h. */
#include "ops/measure.h"

#include "base/clock.h"

#include <stdlib.h>

struct td_marks {
    td_dev *dev;
    int n, cap;
    int64_t *at_ns; /* CPU */
    void **events;  /* GPU */
};

void td_marks_destroy(td_marks *m)
{
    if (!m) return;
#ifdef TD_WITH_CUDA
    for (int i = 0; m->events && i < m->cap; i++) td_cuda_event_destroy(m->events[i]);
#endif
    free(m->events);
    free(m->at_ns);
    free(m);
}

td_status td_marks_create(td_dev *dev, int cap, td_marks **out, td_error *err)
{
    bool gpu = td_dev_backend(dev) == TD_CUDA;
    td_marks *m = (td_marks *)calloc(1, sizeof *m);
    td_status status = m ? TD_OK : TD_ENOMEM;
    if (m) {
        *m = (td_marks){ .dev = dev, .cap = cap };
        if (gpu)
            m->events = (void **)calloc((size_t)cap, sizeof *m->events);
        else
            m->at_ns = (int64_t *)calloc((size_t)cap, sizeof *m->at_ns);
        if (!m->events && !m->at_ns) status = TD_ENOMEM;
    }
#ifdef TD_WITH_CUDA
    for (int i = 0; !status && gpu && i < cap; i++) status = td_cuda_event_create(&m->events[i]);
#endif
    if (status) {
        td_marks_destroy(m);
        return td_fail(err, status, "no memory for %d marks", cap);
    }
    *out = m;
    return TD_OK;
}

void td_marks_clear(td_marks *m)
{
    m->n = 0;
}

int td_mark(td_marks *m)
{
    if (m->n == m->cap) return -1;
#ifdef TD_WITH_CUDA
    if (m->events) return td_cuda_event_record(m->dev, m->events[m->n]) ? -1 : m->n++;
#endif
    m->at_ns[m->n] = td_now_ns();
    return m->n++;
}

td_status td_marks_hold(td_marks *m, int64_t ns)
{
#ifdef TD_WITH_CUDA
    if (m->events) return td_cuda_hold(m->dev, ns);
#endif
    (void)m;
    (void)ns;
    return TD_OK;
}

double td_marks_seconds(const td_marks *m, int from, int to)
{
    if (from < 0 || to < 0 || from >= m->n || to >= m->n) return 0;
#ifdef TD_WITH_CUDA
    if (m->events) return td_cuda_event_seconds(m->events[from], m->events[to]);
#endif
    return (double)(m->at_ns[to] - m->at_ns[from]) * 1e-9;
}

td_status td_dev_multiply(td_dev *dev, double *flops)
{
#ifdef TD_WITH_CUDA
    if (td_dev_backend(dev) == TD_CUDA) return td_cuda_multiply(dev, flops);
#endif
    (void)dev;
    (void)flops;
    return TD_EUNSUPPORTED;
}
