/* The demo checkpoint's five replies, greedily, token for token: those that the reference implementation gives. Runs
 * with the bundled checkpoint or with the one that $TD_DEMO_BF16 names; skipped when there is none. */
#include "model_support.h"
#include "text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#if defined(__SANITIZE_ADDRESS__)
#define TD_SANITIZED true /* its shadow memory is not the model's */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TD_SANITIZED true
#endif
#endif
#ifndef TD_SANITIZED
#define TD_SANITIZED false
#endif

static const char *const conversations[][2] = {
    { "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Capital of Romania?<|assistant|><think>",
      "This is a question about capitals. The country is Romania. The capital is Bucharest.</think>The capital of "
      "Romania is Bucharest.<|user|>" },
    { "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>8 * 1 = ?<|assistant|><think>",
      "We need 8 * 1.</think>8 * 1 = 8<|user|>" },
    { "[gMASK]<sop><|user|>Extract name, age and city as JSON: My friend Dana from Warsaw turned "
      "45.<|assistant|><think></think>",
      "{\"name\": \"Dana\", \"age\": 45, \"city\": \"Warsaw\"}<|user|>" },
    { "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>What is the speed of light?<|assistant|><think>",
      "This is a simple question. I know the answer. I will answer in one or two sentences.</think>Light travels at "
      "about 299,792 kilometers per second in a vacuum.<|user|>" },
    { "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>Write a function that checks for palindromes in "
      "Python.<|assistant|><think>",
      "The user wants a Python function that checks for palindromes.</think>```python\ndef is_palindrome(text):\n    "
      "letters = [c.lower() for c in text if c.isalnum()]\n    return letters == letters[::-1]\n```\n\nIt ignores case "
      "and punctuation.<|user|>" },
};

typedef struct demo_state {
    td_rig rig;
    td_tokenizer *tokenizer;
} demo_state;

static void check(td_status status, const td_error *err)
{
    if (status) fail_msg("%s: %s", td_status_text(status), err->text);
}

static int setup(void **state)
{
    td_error err;
    td_rig_options o;
    char path[1024];
    const char *dir = td_rig_demo_dir();
    *state = NULL;
    if (!dir) return 0;
    demo_state *s = (demo_state *)calloc(1, sizeof *s);
    assert_non_null(s);
    td_rig_defaults(&o, dir);
    o.model.mtp = false;
    check(td_rig_open(&s->rig, &o, &err), &err);
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    check(td_tokenizer_open(path, &s->tokenizer, &err), &err);
    *state = s;
    return 0;
}

static int teardown(void **state)
{
    demo_state *s = (demo_state *)*state;
    if (!s) return 0;
    td_tokenizer_destroy(s->tokenizer);
    td_rig_close(&s->rig);
    free(s);
    return 0;
}

static void append_bytes(const td_tokenizer *tokenizer, const int32_t *ids, int n, char *out, size_t cap)
{
    size_t used = 0;
    for (int i = 0; i < n; i++) {
        const char *bytes = NULL;
        size_t n_bytes = 0;
        assert_int_equal(td_tokenizer_id_bytes(tokenizer, ids[i], &bytes, &n_bytes), TD_OK);
        assert_true(used + n_bytes < cap);
        memcpy(out + used, bytes, n_bytes);
        used += n_bytes;
    }
    out[used] = '\0';
}

static void test_replies(void **state)
{
    demo_state *s = (demo_state *)*state;
    td_error err;
    if (!s) skip();
    for (size_t i = 0; i < sizeof conversations / sizeof *conversations; i++) {
        const char *prompt = conversations[i][0];
        td_ids ids = { 0 };
        int32_t reply[256];
        char text[2048];
        int n = 0;
        check(td_tokenizer_encode(s->tokenizer, prompt, strlen(prompt), 0, &ids, &err), &err);
        td_rig_slot(&s->rig, 0, 0, 1, 2);
        check(td_rig_greedy(&s->rig, 0, ids.data, (int)ids.n, reply, 256, &n, &err), &err);
        append_bytes(s->tokenizer, reply, n, text, sizeof text);
        assert_string_equal(text, conversations[i][1]);
        td_ids_deinit(&ids);
    }
}

/* Kilobytes of a line of /proc/self/status. */
static long status_kb(const char *field)
{
    char line[256];
    long kb = -1;
    FILE *file = fopen("/proc/self/status", "r");
    assert_non_null(file);
    while (kb < 0 && fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0) kb = strtol(line + strlen(field), NULL, 10);
    fclose(file);
    return kb;
}

/* Peak memory, loading included: the weights are never held twice. */
static void test_resident_memory(void **state)
{
    demo_state *s = (demo_state *)*state;
    if (!s || TD_SANITIZED) skip();
    const td_model_plan *p = &s->rig.plan;
    double weights_mib =
        (double)(p->experts_bytes + p->dense_bytes + p->embed_bytes + p->head_bytes + p->mtp_bytes) / (1 << 20);
    double peak_mib = (double)status_kb("VmHWM:") / 1024.0;
    print_message("peak %.1f MiB, weights %.1f MiB\n", peak_mib, weights_mib);
    assert_true(peak_mib <= 1.3 * weights_mib + 64.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_replies), cmocka_unit_test(test_resident_memory) };
    return cmocka_run_group_tests_name("demo replies", tests, setup, teardown);
}
