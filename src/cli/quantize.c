/* tandem quantize IN OUT: the command around td_exl3_convert: settings, progress, what was reached. */
#include "base/clock.h"
#include "base/settings.h"
#include "checkpoint/exl3_convert.h"
#include "checkpoint/parallel.h"
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
    int64_t start_ns;
    int shown; /* tenths, without a terminal */
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

static void show_progress(void *user, const td_convert_progress *p)
{
    enum { WIDTH = 30 };
    display *d = user;
    char left[32];
    double spent_s = (double)(td_now_ns() - d->start_ns) / 1e9;
    format_time(spent_s / p->n_done * (p->n_total - p->n_done), left);
    int percent = (int)(100LL * p->n_done / p->n_total), filled = WIDTH * percent / 100;
    if (d->tty) {
        fprintf(stderr, "\r[%.*s%.*s] %3d %%  %d of %d matrices, error %.3e, %s left   ", filled,
                "##############################", WIDTH - filled, "..............................", percent, p->n_done,
                p->n_total, p->nmse_sum / p->n_done, left);
        if (p->n_done == p->n_total) fputc('\n', stderr);
    } else if (percent / 10 > d->shown) {
        d->shown = percent / 10;
        fprintf(stderr, "%3d %%  %d of %d matrices, error %.3e, %s left\n", percent, p->n_done, p->n_total,
                p->nmse_sum / p->n_done, left);
    }
}

/* The Hessians of a calibration text come from a forward pass of IN; this is where it would be handed over. */
static td_status open_calibration(const char *file, td_error *err)
{
    return td_fail(
        err, TD_EUNSUPPORTED,
        "--calibration %s: this build has no calibration pass; leave the setting out to weigh all inputs alike", file);
}

static int fail(td_status status, const td_error *err)
{
    fprintf(stderr, "tandem quantize: %s\n", err->text);
    return status == TD_ENOMEM ? TD_EXIT_MEMORY : status == TD_EINVAL ? TD_EXIT_ARGUMENTS : TD_EXIT_FAILED;
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
    if (!status && *td_settings_text(&s, "calibration"))
        status = open_calibration(td_settings_text(&s, "calibration"), &err);
    if (status) return fail(status, &err);

    long n_processors = sysconf(_SC_NPROCESSORS_ONLN);
    int n_threads = (int)td_settings_int(&s, "threads");
    if (n_threads == 0)
        n_threads = n_processors < 1 ? 1 : n_processors > TD_PARALLEL_MAX ? TD_PARALLEL_MAX : (int)n_processors;
    display d = { .tty = isatty(2), .start_ns = td_now_ns() };
    td_convert_args args = { .from_dir = argv[1],
                             .to_dir = argv[2],
                             .bits = (int)td_settings_int(&s, "bits"),
                             .n_threads = n_threads,
                             .shard_bytes_max = (uint64_t)td_settings_int(&s, "shard-mb") * 1000000,
                             .progress = show_progress,
                             .progress_user = &d };
    td_convert_progress result;
    status = td_exl3_codebook_parse(td_settings_text(&s, "codebook"), &args.codebook, &err);
    if (!status) status = td_exl3_convert(&args, &result, &err);
    if (status) return fail(status, &err);
    char spent[32];
    format_time((double)(td_now_ns() - d.start_ns) / 1e9, spent);
    printf("%s: %d matrices at %d bits in %s; relative square error %.3e on average, %.3e at most\n", args.to_dir,
           result.n_done, args.bits, spent, result.n_done ? result.nmse_sum / result.n_done : 0.0, result.nmse_most);
    return TD_EXIT_OK;
}
