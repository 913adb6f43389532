/* tandem quantize IN OUT: the command around td_exl3_convert: settings, progress, what was reached. */
#include "base/clock.h"
#include "base/settings.h"
#include "checkpoint/exl3_convert.h"
#include "checkpoint/parallel.h"
#include "cli/calibration.h"
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const td_setting SETTINGS[] = {
    { .name = "bits",
      .kind = TD_SETTING_INT,
      .fallback = "4",
      .min = 1,
      .max = 8,
      .value = "N",
      .group = "Result",
      .help = "bits per weight of the routed experts; 4 is what the published checkpoints have" },
    { .name = "codebook",
      .kind = TD_SETTING_CHOICE,
      .fallback = "mcg",
      .choices = "mcg|3inst|mul1",
      .value = "NAME",
      .help = "mcg is the one that tandem serves; the others are for comparison" },
    { .name = "shard-mb",
      .kind = TD_SETTING_INT,
      .fallback = "2000",
      .min = 1,
      .max = 100000,
      .value = "MB",
      .help = "largest size of one safetensors file" },
    { .name = "calibration",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "FILE",
      .group = "Making",
      .help = "text to weigh errors by what the experts really see (UTF-8)" },
    { .name = "calibration-tokens",
      .kind = TD_SETTING_INT,
      .fallback = "65536",
      .min = 1,
      .max = 100000000,
      .value = "N",
      .help = "at most so many tokens of that text; a disk beside OUT holds 2 bytes x width x MoE layers for each" },
    { .name = "threads",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = TD_PARALLEL_MAX,
      .value = "N",
      .help = "0: one a processor; the result does not depend on it" },
};

enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS };

static void print_help(void)
{
    printf("usage: tandem quantize IN OUT [settings]\n"
           "\n"
           "Makes an EXL3 checkpoint from a BF16 one: the routed experts (also those of the MTP layer) become\n"
           "trellis-coded matrices of a few bits a weight, everything else is copied byte for byte. IN is a\n"
           "folder as published, with config.json, tokenizer.json and *.safetensors; OUT is a new folder, which\n"
           "appears only when it is complete. The same input gives the same bytes on every machine.\n"
           "\n");
    td_settings_help(SETTINGS, N_SETTINGS);
    printf("\n"
           "What to expect: at 4 bits a weight is off by 6.7 %% of its size in the root mean square (2 bits 26 %%,\n"
           "3 bits 13 %%, 6 bits 1.8 %%). A processor core searches about 80,000 weights a second at 4 bits: the\n"
           "demo model takes a minute or two, the full GLM-5.3-Flash many core-days.\n"
           "\n"
           "example    tandem quantize models/my-glm-bf16 models/my-glm-exl3 --bits 4\n"
           "           tandem info models/my-glm-exl3\n");
}

/* How the run stands on stderr: one line that is rewritten on a terminal, else a line every ten per cent. */
typedef struct display {
    bool tty;
    int64_t start_ns; /* of the matrices: after the calibration */
    int shown;        /* tenths, without a terminal */
} display;

static void format_time(double s, char text[32])
{
    if (s < 90)
        snprintf(text, 32, "%.0f s", s);
    else if (s < 5400)
        snprintf(text, 32, "%.0f min", s / 60);
    else
        snprintf(text, 32, "%.1f h", s / 3600);
}

/* True when a line is due; starts it with the bar on a terminal. */
static bool begin_line(display *d, int percent)
{
    enum { WIDTH = 30 };
    int filled = WIDTH * percent / 100;
    if (d->tty)
        fprintf(stderr, "\r[%.*s%.*s] ", filled, "##############################", WIDTH - filled,
                "..............................");
    else if (percent / 10 > d->shown)
        d->shown = percent / 10;
    else
        return false;
    fprintf(stderr, "%3d %%  ", percent);
    return true;
}

static void end_line(const display *d, bool last)
{
    fputs(d->tty ? "   " : "\n", stderr);
    if (d->tty && last) fputc('\n', stderr);
}

static void show_progress(void *user, const td_convert_progress *p)
{
    display *d = user;
    char left[32];
    double spent_s = (double)(td_now_ns() - d->start_ns) / 1e9;
    format_time(spent_s / p->n_done * (p->n_total - p->n_done), left);
    if (!begin_line(d, (int)(100LL * p->n_done / p->n_total))) return;
    fprintf(stderr, "%d of %d matrices, error %.3e, %s left", p->n_done, p->n_total, p->nmse_sum / p->n_done, left);
    end_line(d, p->n_done == p->n_total);
}

static void show_calibration(void *user, int64_t n_done, int64_t n_total)
{
    display *d = user;
    if (begin_line(d, (int)(100 * n_done / n_total))) {
        fprintf(stderr, "%lld of %lld tokens of calibration text", (long long)n_done, (long long)n_total);
        end_line(d, n_done == n_total);
    }
    d->start_ns = td_now_ns();
    if (n_done == n_total) d->shown = 0;
}

static int fail(td_status status, const td_error *err)
{
    fprintf(stderr, "tandem quantize: %s\n", err->text);
    return status == TD_ENOMEM ? TD_EXIT_MEMORY : status == TD_EINVAL ? TD_EXIT_ARGUMENTS : TD_EXIT_FAILED;
}

static int thread_count(const td_settings *s)
{
    long n_processors = sysconf(_SC_NPROCESSORS_ONLN);
    int n = (int)td_settings_int(s, "threads");
    if (n > 0) return n;
    return n_processors < 1 ? 1 : n_processors > TD_PARALLEL_MAX ? TD_PARALLEL_MAX : (int)n_processors;
}

/* Converts, with Hessians from the calibration text when one is named. */
static td_status convert(const td_settings *s, td_convert_args *args, display *d, td_convert_progress *result,
                         td_error *err)
{
    td_calibration *calibration = NULL;
    td_calibration_options options = { .checkpoint_dir = args->from_dir,
                                       .text_path = td_settings_text(s, "calibration"),
                                       .scratch_path = args->to_dir,
                                       .tokens_max = td_settings_int(s, "calibration-tokens"),
                                       .n_threads = args->n_threads,
                                       .progress = show_calibration,
                                       .progress_user = d };
    td_status status = TD_OK;
    if (*options.text_path) {
        status = td_calibration_create(&options, &calibration, err);
        if (status) return status;
        args->hessian = td_calibration_source(calibration);
    }
    status = td_exl3_convert(args, result, err);
    td_calibration_destroy(calibration);
    return status;
}

static void report(const td_convert_args *args, const td_convert_progress *result, int64_t start_ns)
{
    char spent[32];
    format_time((double)(td_now_ns() - start_ns) / 1e9, spent);
    printf("%s: %d matrices at %d bits in %s; relative square error %.3e on average, %.3e at most\n", args->to_dir,
           result->n_done, args->bits, spent, result->n_done ? result->nmse_sum / result->n_done : 0.0,
           result->nmse_most);
    if (args->hessian)
        printf("%d of them weighed by the calibration text%s\n", result->n_feedback,
               result->n_feedback < result->n_done ? "; the experts of the others saw too few of its tokens" : "");
}

int td_cli_quantize(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") != 0 && strcmp(argv[i], "-h") != 0) continue;
        print_help();
        return TD_EXIT_OK;
    }
    if (argc < 3 || argv[1][0] == '-' || argv[2][0] == '-') {
        fprintf(stderr, "tandem quantize: first the two folders: tandem quantize IN OUT [settings]; --help explains\n");
        return TD_EXIT_ARGUMENTS;
    }
    td_error err;
    td_settings s;
    td_status status = td_settings_parse(SETTINGS, N_SETTINGS, argc - 2, argv + 2, &s, &err);
    if (status) return fail(status, &err);

    display d = { .tty = isatty(2), .start_ns = td_now_ns() };
    int64_t start_ns = d.start_ns;
    td_convert_args args = { .from_dir = argv[1],
                             .to_dir = argv[2],
                             .bits = (int)td_settings_int(&s, "bits"),
                             .n_threads = thread_count(&s),
                             .shard_bytes_max = (uint64_t)td_settings_int(&s, "shard-mb") * 1000000,
                             .progress = show_progress,
                             .progress_user = &d };
    td_convert_progress result;
    status = td_exl3_codebook_parse(td_settings_text(&s, "codebook"), &args.codebook, &err);
    if (!status) status = convert(&s, &args, &d, &result, &err);
    if (status) return fail(status, &err);
    report(&args, &result, start_ns);
    return TD_EXIT_OK;
}
