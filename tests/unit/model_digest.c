/* The bits of the logits on this machine, as one number. The bundled checkpoint reads one prompt and goes on greedily;
 * every bit of every logits row and every chosen id goes into a 64-bit FNV. Compilers and machines must agree: the
 * known answer below is that of x86-64 (gcc, clang) and of arm64 (gcc, under qemu). A change of the arithmetic changes
 * it on purpose, and then the comparison with the reference (tests/oracle/model) says whether the change was right.
 *
 *     model_digest        the digest; exit code 1 when it is not the known one */
#include <inttypes.h>
#include <stdio.h>

#include "base/hash.h"
#include "model_support.h"

#define KNOWN 0x00f64c1210a31d81u

enum { N_STEPS = 16, VOCAB_MAX = 1 << 16 };

/* 65 tokens, one more than the grid of KDA chunks:
 * [gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Capital of Romania?<|assistant|><think>This is a question about
 * capitals. The country is Romania. The capital is Bucharest.</think>The capital of Romania is Bucharest.<|user|>Write
 * a function that checks for palindromes in Python.<|assistant|><think> */
static const int32_t PROMPT[] = { 4054, 4056, 4058, 2903, 425,  426,  25,  613,  4059, 34,   361,  612,  292,
                                  2649, 3563, 30,   4060, 4073, 1950, 302, 258,  909,  663,  1342, 13,   299,
                                  1175, 302,  2649, 3563, 13,   299,  654, 302,  2580, 396,  1066, 316,  13,
                                  4074, 1085, 654,  292,  2649, 3563, 302, 2580, 396,  1066, 316,  13,   4059,
                                  54,   739,  258,  367,  397,  1827, 342, 3511, 314,  797,  13,   4060, 4073 };

static td_status digest_of(td_rig *rig, uint64_t *digest, td_error *err)
{
    static float logits[VOCAB_MAX];
    int n = td_rig_vocab(rig);
    td_check(n <= VOCAB_MAX);
    td_rig_slot(rig, 0, 0, 1, 1);
    td_status status = td_rig_prefill(rig, 0, PROMPT, (int)(sizeof PROMPT / sizeof *PROMPT), 512, err);
    for (int step = 0; step < N_STEPS && !status; step++) {
        td_rig_logits(rig, 0, logits);
        int32_t id = td_rig_argmax(logits, n);
        *digest = td_fnv1a(*digest, logits, (size_t)n * sizeof *logits);
        *digest = td_fnv1a(*digest, &id, sizeof id);
        printf("%d ", id);
        status = td_rig_run(rig, 0, &id, 1, false, false, err);
    }
    return status;
}

int main(void)
{
    td_rig rig;
    td_rig_options options;
    td_error err;
    uint64_t digest = TD_FNV1A_START;
    td_rig_defaults(&options, "models/demo");
    options.model.mtp = false;
    td_status status = td_rig_open(&rig, &options, &err);
    if (!status) {
        status = digest_of(&rig, &digest, &err);
        td_rig_close(&rig);
    }
    if (status) {
        fprintf(stderr, "%s: %s\n", td_status_text(status), err.text);
        return 1;
    }
    printf("\nlogits %016" PRIx64 ", known %016" PRIx64 "\n", digest, (uint64_t)KNOWN);
    return digest == KNOWN ? 0 : 1;
}
