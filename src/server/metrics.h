/* Numbers for Prometheus (docs/server.md "Metrics"): what the server itself measures, and the engine's counters, in its
 * own names and again in vLLM's, so that dashboards made for vLLM work. What is not measured is not written. Internal.
 */
#ifndef TD_SERVER_METRICS_H
#define TD_SERVER_METRICS_H

#include "base/buf.h"
#include "engine/engine.h"

TD_BEGIN_C

typedef struct td_metrics td_metrics;

td_metrics *td_metrics_create(void); /* NULL: out of memory */
void td_metrics_destroy(td_metrics *metrics);

/* One HTTP call. handler: a route's path, a static string; status 0: the client left before the reply. */
void td_metrics_http(td_metrics *metrics, const char *handler, const char *method, int status);

/* One request for tokens, however it ended. */
typedef struct td_metrics_request {
    const char *key;                 /* label of the API key; "" without keys */
    const char *status;              /* "stop", "length", "canceled", "error", "refused"; static */
    bool ran;                        /* it was queued: the numbers below are meant */
    double latency_s, first_token_s; /* from arrival; first_token_s < 0: there was none */
    td_request_stats stats;
    int n_tokens, max_tokens; /* of the reply; max_tokens after cutting to the window */
} td_metrics_request;
void td_metrics_request_done(td_metrics *metrics, const td_metrics_request *request);

/* n tokens of a reply arrived together, gap_s after the ones before them (gap_s < 0: the first). */
void td_metrics_tokens(td_metrics *metrics, int n, double gap_s);
void td_metrics_client_left(td_metrics *metrics);

/* The whole page. engine may be NULL (not ready: its numbers are left out). */
void td_metrics_write(td_metrics *metrics, const char *model, const td_engine_stats *engine, td_buf *out);

TD_END_C
#endif
