/* What opcheck says: a line an operation and a line a failure for people, one JSON object with every check for
 * programs.
 */
#include "base/clock.h"
#include "opcheck.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILURES_SHOWN = 200 };

static double now_s(void)
{
    return 1e-9 * (double)td_now_ns();
}

/* ---- lists ---- */

static void list_begin(oc_list *list)
{
    td_buf_init(&list->text, 0);
    list->writer = (td_json_writer){ .out = &list->text };
    td_json_write_begin(&list->writer, '[');
}

static void list_end(td_json_writer *out, const char *name, oc_list *list)
{
    td_json_write_end(&list->writer, ']');
    td_json_write_key(out, name);
    td_json_write_raw(out, list->text.data, list->text.n_bytes);
    td_buf_deinit(&list->text);
}

static void member_double(td_json_writer *w, const char *name, double x)
{
    td_json_write_key(w, name);
    td_json_write_double(w, x);
}

/* ---- checks ---- */

bool oc_case(oc_ctx *oc, const char *fmt, ...)
{
    va_list list;
    oc_end(oc);
    va_start(list, fmt);
    vsnprintf(oc->what, sizeof oc->what, fmt, list);
    va_end(list);
    bool ours = oc->op_cases++ % oc->n_parts == oc->part;
    if (oc->verbose) fprintf(stderr, "%s: %s%s\n", oc->op, oc->what, ours ? "" : ", left to another part");
    return ours;
}

void oc_begin(oc_ctx *oc, const char *name)
{
    oc_end(oc);
    oc->now = (oc_result){ .ok = true };
    snprintf(oc->now.name, sizeof oc->now.name, "%s", name);
    oc->open = true;
}

void oc_measured(oc_ctx *oc, double error, double bound)
{
    oc->now.error = error;
    oc->now.bound = bound;
    if (error / bound <= oc->worst) return;
    oc->worst = error / bound;
    oc->worst_result = oc->now;
    snprintf(oc->worst_case, sizeof oc->worst_case, "%s", oc->what);
}

void oc_end(oc_ctx *oc)
{
    const oc_result *r = &oc->now;
    if (!oc->open) return;
    oc->open = false;
    oc->op_checks++;
    oc->op_failed += !r->ok;
    if (!oc->json) return;
    td_json_writer *w = &oc->checks.writer;
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "op", oc->op);
    td_json_write_member_text(w, "shape", oc->what);
    td_json_write_member_text(w, "what", r->name);
    if (r->bound > 0.0) member_double(w, "error", r->error);
    if (r->bound > 0.0) member_double(w, "bound", r->bound);
    td_json_write_member_bool(w, "ok", r->ok);
    if (!r->ok) td_json_write_member_text(w, "detail", r->detail);
    td_json_write_end(w, '}');
}

void oc_fail(oc_ctx *oc, const char *fmt, ...)
{
    char text[sizeof oc->now.detail];
    va_list list;
    td_check(oc->open);
    va_start(list, fmt);
    vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    if (oc->now.ok) memcpy(oc->now.detail, text, sizeof text);
    oc->now.ok = false;
    if (oc->json || oc->n_failed + oc->op_failed >= FAILURES_SHOWN) return;
    printf("FAILED %s [%s] %s: %s   (--op %s --seed %llu", oc->op, oc->what, oc->now.name, text, oc->op,
           (unsigned long long)oc->first_seed);
    if (oc->n_parts > 1) printf(" --part %d/%d", oc->part, oc->n_parts);
    printf(")\n");
    fflush(stdout);
}

void oc_expect(oc_ctx *oc, bool ok, const char *name)
{
    oc_begin(oc, name);
    if (!ok) oc_fail(oc, "it does not hold");
    oc_end(oc);
}

/* ---- operations ---- */

void oc_op_begin(oc_ctx *oc, const char *op)
{
    oc->op = op;
    oc->what[0] = '\0';
    oc->op_checks = oc->op_failed = oc->op_cases = 0;
    oc->worst = 0.0;
    oc->op_start_s = now_s();
}

static void print_op(const oc_ctx *oc, double seconds)
{
    char largest[384] = "-";
    if (oc->worst > 0.0)
        snprintf(largest, sizeof largest, "%.2g of %.2g (%.0f %%): %s, %s", oc->worst_result.error,
                 oc->worst_result.bound, 100.0 * oc->worst, oc->worst_case, oc->worst_result.name);
    printf("%-12s %6d %7d %6.1f s   %s\n", oc->op, oc->op_checks, oc->op_failed, seconds, largest);
    fflush(stdout);
}

void oc_op_end(oc_ctx *oc)
{
    oc_end(oc);
    double seconds = now_s() - oc->op_start_s;
    oc->n_checks += oc->op_checks;
    oc->n_failed += oc->op_failed;
    if (!oc->json) {
        if (oc->op_checks) print_op(oc, seconds);
        return;
    }
    td_json_writer *w = &oc->summaries.writer;
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "op", oc->op);
    td_json_write_member_int(w, "checks", oc->op_checks);
    td_json_write_member_int(w, "failed", oc->op_failed);
    member_double(w, "worst_of_bound", oc->worst);
    member_double(w, "seconds", seconds);
    td_json_write_end(w, '}');
}

void oc_report_time(oc_ctx *oc, const char *name, int rows, double us, double gb_s, double of_copy, double tflops)
{
    td_json_writer *w = &oc->times.writer;
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "name", name);
    td_json_write_member_int(w, "rows", rows);
    member_double(w, "us", us);
    member_double(w, "gb_s", gb_s);
    member_double(w, "of_copy", of_copy);
    member_double(w, "tflops", tflops);
    td_json_write_end(w, '}');
}

/* ---- the whole ---- */

static const char *shapes_of(const oc_ctx *oc)
{
    return !oc->real ? "demo" : oc->demo ? "all" : "real";
}

void oc_report_begin(oc_ctx *oc)
{
    oc->start_s = now_s();
    if (oc->json) {
        list_begin(&oc->checks);
        list_begin(&oc->times);
        list_begin(&oc->summaries);
        return;
    }
    printf("%s, %s shapes, seed %llu\n\n%-12s %6s %7s %8s   %s\n", oc->gpu, shapes_of(oc),
           (unsigned long long)oc->first_seed, "operation", "checks", "failed", "time", "largest error of its bound");
    fflush(stdout);
}

void oc_report_end(oc_ctx *oc, const char *fatal)
{
    double seconds = now_s() - oc->start_s;
    bool ok = !fatal && !oc->n_failed;
    if (!oc->json) {
        if (fatal) printf("\nGIVEN UP: %s\n", fatal);
        printf("\n%d checks, %d failed, %.1f s\n", oc->n_checks, oc->n_failed, seconds);
        return;
    }
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "gpu", oc->gpu);
    td_json_write_member_int(&w, "seed", (int64_t)oc->first_seed);
    td_json_write_member_text(&w, "shapes", shapes_of(oc));
    list_end(&w, "checks", &oc->checks);
    list_end(&w, "times", &oc->times);
    list_end(&w, "ops", &oc->summaries);
    td_json_write_key(&w, "summary");
    td_json_write_begin(&w, '{');
    td_json_write_member_int(&w, "checks", oc->n_checks);
    td_json_write_member_int(&w, "failed", oc->n_failed);
    member_double(&w, "seconds", seconds);
    td_json_write_member_bool(&w, "ok", ok);
    if (fatal) td_json_write_member_text(&w, "given_up", fatal);
    td_json_write_end(&w, '}');
    td_json_write_end(&w, '}');
    printf("%s\n", out.data ? out.data : "{}");
    td_buf_deinit(&out);
}

_Noreturn void oc_give_up(oc_ctx *oc, const char *what, const td_error *err)
{
    char text[TD_ERROR_TEXT_CAP + 512];
    snprintf(text, sizeof text, "%s [%s] %s: %s", oc->op, oc->what, what, err->text);
    if (oc->open) oc->now.ok = false;
    if (oc->open) snprintf(oc->now.detail, sizeof oc->now.detail, "%.200s", err->text);
    oc_op_end(oc);
    oc_report_end(oc, text);
    exit(1);
}
