/* Forwards as recordings. A decode or verify window of n rows does the same operations whoever's rows they are:
 * everything else stands in the window's tables. So each number of rows is recorded once and replayed from then on, and
 * the host's work for a forward is to fill the tables and to launch.
 *
 * One more thing fixes a recording: how far selection may have to look, which sets the size of its launches. A
 * recording for the longest context would be right for every window, but its empty blocks cost time; so there are a few
 * levels, the lowest without selection at all. The bits are the same on each (docs/cuda.md). */
#include "model/internal.h"

enum { LEVEL_FACTOR = 8 };

/* Highest position of a window that level's recording serves. */
static int64_t reach(const td_model *m, int level)
{
    int64_t last = m->options.context_tokens - 1, most = (int64_t)m->top_pools * TD_POOL + TD_POOL - 2;
    for (int i = 0; i < level; i++) most *= LEVEL_FACTOR;
    return level == TD_GRAPH_LEVELS - 1 || most > last ? last : most;
}

static int level_of(const td_model *m, int64_t pos_max)
{
    int level = 0;
    while (reach(m, level) < pos_max) level++;
    return level;
}

bool td_model_graph_serves(const td_model *m, const td_model_window *window)
{
    return td_dev_backend(m->dev) != TD_CPU && !m->options.no_graphs && !m->options.check_layers &&
           !td_model_traced(m) && window->n_serial == window->w.n_rows && window->w.n_rows <= m->options.n_logits;
}

/* Entries that this window leaves free point at no segment, and at row 0 for logits nobody reads. The host's view of
 * the segments is an empty one: what a recording may depend on is in w. */
static td_status record(td_model *m, int n_rows, int level, td_graph **out, td_error *err)
{
    static const td_segment none[TD_SEGMENTS_MAX];
    td_model_window window = m->window;
    window.w.n_rows = window.n_serial = window.n_wanted = n_rows;
    window.w.n_segments = n_rows < TD_SEGMENTS_MAX ? n_rows : TD_SEGMENTS_MAX;
    window.w.host_segments = none;
    window.w.host_pos_max = reach(m, level);
    td_status status = td_dev_capture_begin(m->dev);
    if (status) return td_fail(err, status, "recording windows of %d rows: %s", n_rows, td_status_text(status));
    m->recording = true;
    status = td_model_trunk(m, &window, err);
    m->recording = false;
    td_status ended =
        td_dev_capture_end(m->dev, out, status ? NULL : err); /* always: the stream must leave recording */
    if (!status) return ended;
    if (!ended) td_dev_graph_destroy(m->dev, *out);
    return status;
}

static td_status graph_of(td_model *m, int n_rows, int level, td_graph **out, td_error *err)
{
    td_graph **at = &m->graphs[n_rows][level];
    if (!*at) TD_TRY(record(m, n_rows, level, at, err));
    *out = *at;
    return TD_OK;
}

td_status td_model_graph_run(td_model *m, td_model_window *window, td_error *err)
{
    td_graph *graph;
    int n_rows = window->w.n_rows;
    TD_TRY(graph_of(m, n_rows, level_of(m, window->w.host_pos_max), &graph, err));
    for (int i = window->n_wanted; i < n_rows; i++) window->host.wanted[i] = 0;
    td_status status = td_dev_graph_launch(m->dev, graph);
    if (status) return td_fail(err, status, "window of %d rows: %s", n_rows, td_status_text(status));
    m->n_logits = window->n_wanted;
    return td_model_answer(m, 2 * m->config.n_layers, n_rows, err);
}

td_status td_model_prepare(td_model *m, int n_rows, td_error *err)
{
    td_graph *graph;
    if (td_dev_backend(m->dev) == TD_CPU || m->options.no_graphs) return TD_OK;
    if (n_rows > m->options.n_logits) n_rows = m->options.n_logits;
    for (int n = 1; n <= n_rows && n <= TD_WINDOW_MAX; n++)
        for (int level = 0; level <= level_of(m, m->options.context_tokens - 1); level++)
            TD_TRY(graph_of(m, n, level, &graph, err));
    m->n_logits = 0;
    return TD_OK;
}

void td_model_graphs_destroy(td_model *m)
{
    for (int n = 0; n <= TD_WINDOW_MAX; n++)
        for (int level = 0; level < TD_GRAPH_LEVELS; level++) {
            td_dev_graph_destroy(m->dev, m->graphs[n][level]);
            m->graphs[n][level] = NULL;
        }
}
