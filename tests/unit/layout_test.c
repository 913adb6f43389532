/* What must be in a checkpoint and who owns which part: cuts against hand-computed ones, every kind of missing or wrong
 * tensor with its words, the published checkpoint's size to the byte, and tandem info. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "checkpoint/summary.h"
#include "checkpoint_fixture.h"
#include "cli/info.h"

#include <jansson.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define FULL  "tests/unit/data/config_full.json"
#define SMALL "tests/unit/data/config_small.json"
#define P     "model.language_model."
#define E     P "layers.1.mlp.experts.2.up_proj."

static void load_config(const char *path, td_config *config)
{
    char text[16384];
    td_error err = { 0 };
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t n = fread(text, 1, sizeof text, file);
    fclose(file);
    if (td_config_parse(path, text, n, NULL, NULL, 0, config, &err)) fail_msg("%s", err.text);
}

/* --- cuts --- */

static void expect_range(td_range range, int64_t begin, int64_t end)
{
    assert_int_equal(range.begin, begin);
    assert_int_equal(range.end, end);
}

static void test_ranges(void **state)
{
    (void)state;
    expect_range(td_shard_range(64, 1, 0, 3), 0, 22); /* heads of three ranks: 22, 21, 21 */
    expect_range(td_shard_range(64, 1, 1, 3), 22, 43);
    expect_range(td_shard_range(64, 1, 2, 3), 43, 64);
    expect_range(td_shard_range(2048, 128, 0, 3), 0, 768); /* expert width: 768, 640, 640 */
    expect_range(td_shard_range(2048, 128, 1, 3), 768, 1408);
    expect_range(td_shard_range(2048, 128, 2, 3), 1408, 2048);
    expect_range(td_shard_range(154880, 128, 0, 3), 0, 51712); /* vocabulary: 51,712, 51,584, 51,584 */
    expect_range(td_shard_range(154880, 128, 2, 3), 103296, 154880);
    expect_range(td_shard_range(154880, td_shard_unit(154880), 1, 2), 77440, 154880);
    expect_range(td_shard_range(2, 1, 2, 3), 2, 2); /* fewer units than shards */
    for (int total = 1; total < 40; total++) {
        for (int n = 1; n < 6; n++) {
            int64_t at = 0;
            for (int s = 0; s < n; s++) {
                td_range r = td_shard_range(total, 1, s, n);
                assert_int_equal(r.begin, at);
                assert_true(td_range_n(r) == total / n || td_range_n(r) == total / n + 1);
                at = r.end;
            }
            assert_int_equal(at, total);
        }
    }
    assert_int_equal(td_shard_unit(2048), 128);
    assert_int_equal(td_shard_unit(256), 128);
    assert_int_equal(td_shard_unit(128), 64);
    assert_int_equal(td_shard_unit(320), 64);
    assert_int_equal(td_shard_unit(1000), 8);
    assert_int_equal(td_shard_unit(2), 1);
    expect_range(td_rank_shards(0, 1), 0, 2);
    expect_range(td_rank_shards(0, 2), 0, 1);
    expect_range(td_rank_shards(1, 2), 1, 2);
}

static void test_shard(void **state)
{
    (void)state;
    td_config c;
    td_shard s;
    load_config(FULL, &c);
    td_shard_of(&c, 1, 2, &s);
    expect_range(s.heads, 32, 64);
    expect_range(s.kda_heads, 32, 64);
    expect_range(s.intermediate, 6144, 12288);
    expect_range(s.moe, 1024, 2048);
    expect_range(s.shared, 1024, 2048);
    expect_range(s.vocab, 77440, 154880);
    load_config(SMALL, &c);
    td_shard_of(&c, 0, 2, &s);
    expect_range(s.heads, 0, 4);
    expect_range(s.intermediate, 0, 192); /* 5 units of 64: the lower shard has 3 */
    expect_range(s.shared, 0, 256);
    c.n_shared_experts = c.shared_intermediate = 0;
    td_shard_of(&c, 1, 2, &s);
    expect_range(s.shared, 0, 0);
}

/* Shapes of one shard of two, as they must come out for the released widths. */
static const struct cut {
    const char *name;
    td_split split;
    int64_t first, end; /* of shard 1 */
} CUTS[] = {
    { P "embed_tokens.weight", TD_SPLIT_REPLICATED, 0, 154880 },
    { "lm_head.weight", TD_SPLIT_ROWS, 77440, 154880 },
    { P "layers.0.self_attn.q_proj.weight", TD_SPLIT_ROWS, 4096, 8192 },
    { P "layers.0.self_attn.v_conv1d.weight", TD_SPLIT_ROWS, 4096, 8192 },
    { P "layers.0.self_attn.f_a_proj.weight", TD_SPLIT_REPLICATED, 0, 128 },
    { P "layers.0.self_attn.g_b_proj.weight", TD_SPLIT_ROWS, 4096, 8192 },
    { P "layers.0.self_attn.b_proj.weight", TD_SPLIT_ROWS, 32, 64 },
    { P "layers.0.self_attn.A_log", TD_SPLIT_ROWS, 32, 64 },
    { P "layers.0.self_attn.dt_bias", TD_SPLIT_ROWS, 4096, 8192 },
    { P "layers.0.self_attn.o_norm.weight", TD_SPLIT_REPLICATED, 0, 128 },
    { P "layers.0.self_attn.o_proj.weight", TD_SPLIT_COLS, 4096, 8192 },
    { P "layers.3.self_attn.q_a_proj.weight", TD_SPLIT_REPLICATED, 0, 1536 },
    { P "layers.3.self_attn.q_b_proj.weight", TD_SPLIT_ROWS, 8192, 16384 },
    { P "layers.3.self_attn.kv_b_proj.weight", TD_SPLIT_ROWS, 16384, 32768 },
    { P "layers.3.self_attn.o_proj.weight", TD_SPLIT_COLS, 8192, 16384 },
    { P "layers.3.self_attn.indexer.wq_b.weight", TD_SPLIT_REPLICATED, 0, 4096 },
    { P "layers.0.mlp.gate_proj.weight", TD_SPLIT_ROWS, 6144, 12288 },
    { P "layers.2.mlp.down_proj.weight", TD_SPLIT_COLS, 6144, 12288 },
    { P "layers.3.mlp.shared_experts.up_proj.weight", TD_SPLIT_ROWS, 1024, 2048 },
    { P "layers.45.mlp.shared_experts.down_proj.weight", TD_SPLIT_COLS, 1024, 2048 },
    { P "layers.44.mlp.gate.weight", TD_SPLIT_REPLICATED, 0, 288 },
    { P "layers.45.eh_proj.weight", TD_SPLIT_REPLICATED, 0, 4096 },
    { P "layers.0.hc_attn_fn", TD_SPLIT_REPLICATED, 0, 24 },
};

/* Shard 0 of three owns 22 of 64 heads: shows what stays together, which halves do not. */
static const struct {
    const char *name;
    int64_t end;
} THIRDS[] = {
    { P "layers.3.self_attn.q_b_proj.weight", 22 * 256 },
    { P "layers.3.self_attn.kv_b_proj.weight", 22 * 512 },
    { P "layers.3.self_attn.o_proj.weight", 22 * 256 },
    { P "layers.0.self_attn.o_proj.weight", 22 * 128 },
    { P "layers.0.self_attn.k_proj.weight", 22 * 128 },
    { P "layers.0.self_attn.dt_bias", 22 * 128 },
    { P "layers.0.self_attn.A_log", 22 },
    { P "layers.3.mlp.shared_experts.gate_proj.weight", 768 },
};

static td_status check_third(void *user, const td_role *role)
{
    for (size_t i = 0; i < sizeof THIRDS / sizeof *THIRDS; i++) {
        if (strcmp(role->name, THIRDS[i].name) != 0) continue;
        expect_range(td_role_range(role, 0, 3), 0, THIRDS[i].end);
        ++*(size_t *)user;
    }
    return TD_OK;
}

static td_status check_cut(void *user, const td_role *role)
{
    for (size_t i = 0; i < sizeof CUTS / sizeof *CUTS; i++) {
        if (strcmp(role->name, CUTS[i].name) != 0) continue;
        assert_int_equal(role->split, CUTS[i].split);
        expect_range(td_role_range(role, 1, 2), CUTS[i].first, CUTS[i].end);
        ++*(size_t *)user;
    }
    return TD_OK;
}

static void test_cuts(void **state)
{
    (void)state;
    td_config c;
    size_t n_seen = 0;
    load_config(FULL, &c);
    assert_int_equal(td_roles_each(&c, check_cut, &n_seen), TD_OK);
    assert_int_equal(n_seen, sizeof CUTS / sizeof *CUTS);
    n_seen = 0;
    assert_int_equal(td_roles_each(&c, check_third, &n_seen), TD_OK);
    assert_int_equal(n_seen, sizeof THIRDS / sizeof *THIRDS);
}

static void test_slices(void **state)
{
    (void)state;
    float full[24], f[24];
    td_bf16 b[24];
    int16_t raw[24];
    td_error err;
    for (int i = 0; i < 24; i++) full[i] = (float)i;
    td_tensor t = { .name = "t", .dtype = TD_DTYPE_F32, .rank = 2, .shape = { 4, 6 }, .n_bytes = 96, .data = full };
    assert_int_equal(td_slice_rows_f32(&t, (td_range){ 1, 3 }, f, 12, &err), TD_OK);
    for (int i = 0; i < 12; i++) assert_true(f[i] == (float)(6 + i));
    assert_int_equal(td_slice_cols_f32(&t, (td_range){ 4, 6 }, f, 8, &err), TD_OK);
    for (int i = 0; i < 8; i++) assert_true(f[i] == (float)(i / 2 * 6 + 4 + i % 2));
    assert_int_equal(td_slice_cols_bf16(&t, (td_range){ 0, 1 }, b, 4, &err), TD_OK);
    assert_true(td_bf16_f32(b[3]) == 18.0f);
    assert_int_equal(td_slice_rows_bf16(&t, (td_range){ 3, 4 }, b, 6, &err), TD_OK);
    assert_true(td_bf16_f32(b[5]) == 23.0f);
    assert_int_equal(td_slice_rows_f32(&t, (td_range){ 4, 4 }, f, 0, &err), TD_OK);
    assert_int_equal(td_slice_rows_f32(&t, (td_range){ 3, 5 }, f, 24, &err), TD_EINVAL);
    assert_string_equal(err.text, "tensor t: rows 3..5 of 4");
    assert_int_equal(td_slice_cols_f32(&t, (td_range){ -1, 2 }, f, 24, &err), TD_EINVAL);
    assert_string_equal(err.text, "tensor t: columns -1..2 of 6");
    assert_int_equal(td_slice_cols_f32(&t, (td_range){ 0, 2 }, f, 7, &err), TD_EINVAL);
    assert_string_equal(err.text, "tensor t: a slice of 4 x 2 does not fit into 7 elements");

    int16_t cube[24]; /* [2][3][4]: a strip of the middle dimension, as of a trellis */
    for (int i = 0; i < 24; i++) cube[i] = (int16_t)i;
    td_tensor c = { .name = "c", .dtype = TD_DTYPE_I16, .rank = 3, .shape = { 2, 3, 4 }, .n_bytes = 48, .data = cube };
    assert_int_equal(td_slice_raw(&c, 1, (td_range){ 1, 3 }, raw, 32, &err), TD_OK);
    for (int i = 0; i < 16; i++) assert_int_equal(raw[i], i / 8 * 12 + 4 + i % 8);
    assert_int_equal(td_slice_raw(&c, 0, (td_range){ 1, 2 }, raw, 24, &err), TD_OK);
    assert_int_equal(raw[0], 12);
    assert_int_equal(td_slice_raw(&c, 1, (td_range){ 1, 3 }, raw, 31, &err), TD_EINVAL);
    assert_int_equal(td_slice_raw(&c, 3, (td_range){ 0, 1 }, raw, 48, &err), TD_EINVAL);
    assert_string_equal(err.text, "tensor c: no dimension 3, it has 3");
    assert_int_equal(td_slice_raw(&c, 2, (td_range){ 2, 5 }, raw, 48, &err), TD_EINVAL);
}

/* --- verification --- */

typedef void edit_fn(fx_folder *fx);

/* A small model's folder, changed by edit, opened. */
static void open_small(fx_folder *fx, int bits, edit_fn *edit, td_checkpoint **ck)
{
    td_config config;
    td_error err;
    load_config(SMALL, &config);
    fx_create(fx);
    fx_add_model(fx, &config, bits);
    if (edit) edit(fx);
    fx_write(fx, 3);
    fx_copy_file(fx, SMALL, "config.json");
    if (td_checkpoint_open(fx->dir, ck, &err)) fail_msg("%s", err.text);
}

static void last_problem(void *user, const char *text)
{
    snprintf(user, TD_ERROR_TEXT_CAP, "%s", text);
}

static void expect_verify(int bits, edit_fn *edit, td_status status, const char *says)
{
    fx_folder fx;
    td_checkpoint *ck;
    td_error err = { 0 };
    char text[TD_ERROR_TEXT_CAP] = "";
    open_small(&fx, bits, edit, &ck);
    td_status got = td_checkpoint_verify(ck, &err);
    int n = td_checkpoint_problems(ck, last_problem, text);
    if (got != status || !strstr(err.text, says))
        fail_msg("status %d \"%s\", expected %d \"%s\"", got, err.text, status, says);
    assert_int_equal(n, status ? 1 : 0);
    if (status) assert_string_equal(text, err.text);
    td_checkpoint_close(ck);
    fx_destroy(&fx);
}

static void no_norm(fx_folder *fx)
{
    fx_remove(fx, P "norm.weight");
}
static void no_head(fx_folder *fx)
{
    fx_remove(fx, "lm_head.weight");
}
static void no_kda(fx_folder *fx)
{
    fx_remove(fx, P "layers.0.self_attn.dt_bias");
}
static void no_mtp(fx_folder *fx)
{
    fx_remove(fx, P "layers.5.eh_proj.weight");
}
static void no_svh(fx_folder *fx)
{
    fx_remove(fx, E "svh");
}
static void no_mcg(fx_folder *fx)
{
    fx_remove(fx, E "mcg");
}
static void no_trellis(fx_folder *fx)
{
    fx_remove(fx, E "trellis");
}
static void no_vision(fx_folder *fx)
{
    fx_remove(fx, "model.visual.downsample.weight");
}
static void bad_bias(fx_folder *fx)
{
    strcpy(fx_find(fx, P "layers.1.mlp.gate.e_score_correction_bias")->dtype, "BF16");
}
static void bad_shape(fx_folder *fx)
{
    fx_find(fx, P "layers.3.self_attn.kv_b_proj.weight")->shape[0]++;
}
static void bad_dtype(fx_folder *fx)
{
    strcpy(fx_find(fx, P "layers.3.self_attn.kv_b_proj.weight")->dtype, "F16");
}
static void bits_9(fx_folder *fx)
{
    fx_find(fx, E "trellis")->shape[2] = 144;
}
static void bits_half(fx_folder *fx)
{
    fx_find(fx, E "trellis")->shape[2] = 40;
}
static void bits_2(fx_folder *fx)
{
    fx_find(fx, E "trellis")->shape[2] = 32;
}
static void transposed(fx_folder *fx) /* [out / 16, in / 16]: differs where the widths differ */
{
    fx_tensor *t = fx_find(fx, E "trellis");
    t->shape[0]++;
    t->shape[1]--;
}
static void trellis_dtype(fx_folder *fx)
{
    strcpy(fx_find(fx, E "trellis")->dtype, "U16");
}
static void mul1(fx_folder *fx)
{
    fx_add(fx, E "mul1", "I32", 0, NULL);
}
static void packed_signs(fx_folder *fx)
{
    fx_add(fx, E "su", "I16", TD_SHAPE(16));
}
static void bias(fx_folder *fx)
{
    fx_add(fx, E "bias", "F16", TD_SHAPE(256));
}
static void both_forms(fx_folder *fx)
{
    fx_add(fx, E "weight", "BF16", TD_SHAPE(256, 256));
}
static void shared_exl3(fx_folder *fx)
{
    fx_add(fx, P "layers.1.mlp.shared_experts.up_proj.trellis", "I16", TD_SHAPE(16, 32, 64));
}
static void scalar_mcg(fx_folder *fx)
{
    fx_find(fx, E "mcg")->rank = 0;
}
static void odd_shapes(fx_folder *fx) /* spellings of other exporters */
{
    fx_tensor *t = fx_find(fx, P "layers.0.self_attn.A_log");
    *t = (fx_tensor){
        .rank = 4, .shape = { 1, 1, t->shape[0], 1 }, .dtype = "F32", .name = P "layers.0.self_attn.A_log"
    };
    strcpy(fx_find(fx, P "layers.0.hc_attn_fn")->dtype, "F32");
    strcpy(fx_find(fx, P "layers.0.self_attn.q_conv1d.weight")->dtype, "F32");
    strcpy(fx_find(fx, "model.visual.patch_embed.proj.weight")->dtype, "F16");
    fx_add(fx, P "layers.5.embed_tokens.weight", "BF16", TD_SHAPE(512, 256));
    fx_add(fx, "something.else", "F64", TD_SHAPE(1));
}

static void test_verify(void **state)
{
    (void)state;
    expect_verify(4, NULL, TD_OK, "");
    expect_verify(0, NULL, TD_OK, "");
    expect_verify(1, NULL, TD_OK, "");
    expect_verify(8, NULL, TD_OK, "");
    expect_verify(4, bits_2, TD_OK, ""); /* mixed widths */
    expect_verify(4, scalar_mcg, TD_OK, "");
    expect_verify(4, odd_shapes, TD_OK, "");
    expect_verify(4, no_norm, TD_ENOTFOUND, ": tensor " P "norm.weight is missing, expected [256]");
    expect_verify(4, no_head, TD_ENOTFOUND, ": tensor lm_head.weight is missing, expected [512, 256]");
    expect_verify(4, no_kda, TD_ENOTFOUND, "layers.0.self_attn.dt_bias is missing, expected [512]");
    expect_verify(4, no_mtp, TD_ENOTFOUND, "layers.5.eh_proj.weight is missing, expected [256, 512]");
    expect_verify(4, no_vision, TD_ENOTFOUND, "model.visual.downsample.weight is missing, expected [256, 64, 2, 2]");
    expect_verify(4, bad_bias, TD_EFORMAT, "e_score_correction_bias: dtype BF16, expected F32");
    expect_verify(4, bad_shape, TD_EFORMAT, "kv_b_proj.weight: shape [769, 64], expected [768, 64]");
    expect_verify(4, bad_dtype, TD_EFORMAT, "kv_b_proj.weight: dtype F16, expected BF16 or F32");
}

static void test_verify_experts(void **state)
{
    (void)state;
    expect_verify(4, no_svh, TD_ENOTFOUND, "tensor " E "svh is missing, expected [256]");
    expect_verify(4, no_mcg, TD_ENOTFOUND, "tensor " E "mcg is missing");
    expect_verify(4, no_trellis, TD_ENOTFOUND, "tensor " E "weight is missing, expected [256, 256]");
    expect_verify(4, bits_9, TD_EUNSUPPORTED, E "trellis: last dimension 144, must be 16 * bits with 1 to 8 bits");
    expect_verify(4, bits_half, TD_EUNSUPPORTED, E "trellis: last dimension 40, must be 16 * bits");
    expect_verify(4, transposed, TD_EFORMAT, E "trellis: shape [17, 15, 64], expected [16, 16, 64]");
    expect_verify(4, trellis_dtype, TD_EFORMAT, E "trellis: dtype U16, expected I16");
    expect_verify(4, mul1, TD_EUNSUPPORTED, E "mul1: not supported, EXL3 must be trellis, suh, svh and mcg");
    expect_verify(4, packed_signs, TD_EUNSUPPORTED, E "su: not supported");
    expect_verify(4, bias, TD_EUNSUPPORTED, E "bias: not supported");
    expect_verify(4, both_forms, TD_EFORMAT, E "weight: stands beside its own EXL3 form");
    expect_verify(4, shared_exl3, TD_EUNSUPPORTED, "shared_experts.up_proj.trellis: only routed experts may be EXL3");
}

static void test_marker(void **state)
{
    (void)state;
    fx_folder fx;
    td_checkpoint *ck;
    td_error err;
    td_expert_matrix m;
    open_small(&fx, 4, NULL, &ck);
    assert_int_equal(td_checkpoint_expert(ck, 1, 2, TD_PROJ_DOWN, &m, &err), TD_OK);
    assert_int_equal(m.bits, 4);
    assert_null(m.weight);
    assert_int_equal(td_expert_matrix_check_marker(&m, &err), TD_OK);
    uint32_t other = 0x83DCD12D;
    td_tensor wrong = *m.mcg;
    wrong.data = &other;
    m.mcg = &wrong;
    assert_int_equal(td_expert_matrix_check_marker(&m, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "down_proj.mcg: holds 0x83DCD12D, must be 0xCBAC1FED"));
    assert_int_equal(td_checkpoint_expert(ck, 0, 0, TD_PROJ_UP, &m, &err), TD_EINVAL); /* a dense layer */
    assert_int_equal(td_checkpoint_expert(ck, 1, 3, TD_PROJ_UP, &m, &err), TD_EINVAL);
    assert_int_equal(td_checkpoint_expert(ck, 6, 0, TD_PROJ_UP, &m, &err), TD_EINVAL);
    assert_int_equal(td_checkpoint_expert(ck, 5, 0, TD_PROJ_UP, &m, &err), TD_OK); /* MTP */
    const td_tensor *t;
    assert_int_equal(
        td_checkpoint_require_layer(ck, 3, "self_attn.q_b_proj.weight", TD_FLOATS, TD_SHAPE(512, 96), &t, &err), TD_OK);
    assert_int_equal(t->shape[1], 96);
    td_checkpoint_release_pages(ck); /* data is there again when it is touched */
    assert_int_equal(*(const uint16_t *)t->data, 0);
    td_checkpoint_close(ck);
    fx_destroy(&fx);
}

/* --- the published size --- */

static void test_published_size(void **state)
{
    (void)state;
    td_config config;
    fx_folder fx;
    td_checkpoint *ck;
    td_error err = { 0 };
    td_summary sum;
    load_config(FULL, &config);
    fx_create(&fx);
    fx_add_model(&fx, &config, 4);
    assert_int_equal(fx.n, 150226);
    fx_write(&fx, 83);
    fx_copy_file(&fx, FULL, "config.json");
    size_t index_bytes = fx_file_bytes(&fx, "model.safetensors.index.json");
    assert_in_range(index_bytes, 15000000, 16500000);

    int64_t start = td_now_ns();
    clock_t cpu = clock();
    td_status status = td_checkpoint_open(fx.dir, &ck, &err);
    int64_t opened = td_now_ns();
    cpu = clock() - cpu;
    if (status) fail_msg("%s", err.text);
    assert_int_equal(td_checkpoint_count(ck), 150226);
    assert_int_equal(td_checkpoint_n_files(ck), 83);
    assert_int_equal(td_checkpoint_data_bytes(ck), 175622979576);
    assert_int_equal(td_checkpoint_index_bytes(ck), 175622979576);
    int64_t verify = td_now_ns();
    assert_int_equal(td_checkpoint_verify(ck, &err), TD_OK);
    int64_t verified = td_now_ns();
    td_summary_make(ck, &sum);
    print_message("150,226 tensors, index %zu bytes: opened in %.3f s (%.3f s of CPU), verified in %.3f s\n",
                  index_bytes, (double)(opened - start) * 1e-9, (double)cpu / CLOCKS_PER_SEC,
                  (double)(verified - verify) * 1e-9);
    assert_true(opened - start < 5000000000); /* under sanitizers and load; docs/checkpoint.md has the real number */

    const td_summary_cell *experts = &sum.trunk[TD_GROUP_EXPERTS], *vision = &sum.trunk[TD_GROUP_VISION];
    assert_int_equal(experts->n_tensors + sum.mtp_experts.n_tensors, 148608);
    assert_int_equal(experts->n_bytes + sum.mtp_experts.n_bytes, 156283454592);
    assert_int_equal(sum.mtp_experts.n_bytes, 3634498944); /* 288 experts of one layer */
    assert_int_equal(experts->rank_bytes[0], 76473186048); /* 6,322,188 * 288 * 42 */
    assert_int_equal(experts->rank_bytes[1], 76473186048);
    assert_int_equal(vision->n_tensors, 347);
    assert_int_equal(vision->n_bytes, 1127254016);
    assert_int_equal(vision->rank_bytes[0], 1127254016);
    assert_int_equal(vision->rank_bytes[1], 0);
    assert_int_equal(sum.mtp.n_tensors - sum.mtp_experts.n_tensors, 25);
    assert_int_equal(sum.unused.n_tensors, 0);
    assert_int_equal(sum.unused.n_bytes, 0);
    assert_int_equal(sum.total.n_tensors, 150226);
    assert_int_equal(sum.bits_least, 4);
    assert_int_equal(sum.bits_most, 4);
    td_checkpoint_close(ck);
    fx_destroy(&fx);
}

/* --- tandem info --- */

/* Runs info with stdout in a file; returns what it printed (to be freed). */
static char *run_info(int expected, const char *a, const char *b)
{
    char *argv[] = { "info", (char *)a, (char *)b, NULL };
    char *text = calloc(1, 65536);
    FILE *file = tmpfile();
    int saved = dup(STDOUT_FILENO);
    assert_true(text && file && saved >= 0);
    fflush(stdout);
    dup2(fileno(file), STDOUT_FILENO);
    int code = td_cli_info(a ? b ? 3 : 2 : 1, argv);
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    rewind(file);
    size_t n = fread(text, 1, 65535, file);
    text[n] = '\0';
    fclose(file);
    if (code != expected) fail_msg("exit code %d, expected %d\n%s", code, expected, text);
    return text;
}

static void expect_info(int code, const char *a, const char *b, const char *const *says)
{
    char *text = run_info(code, a, b);
    for (; *says; says++)
        if (!strstr(text, *says)) fail_msg("\"%s\" is not in:\n%s", *says, text);
    free(text);
}

#define SAYS(...)                                                                                                      \
    (const char *const[])                                                                                              \
    {                                                                                                                  \
        __VA_ARGS__, NULL                                                                                              \
    }

static void two_wrong(fx_folder *fx)
{
    bad_bias(fx);
    no_mcg(fx);
}

static void test_info(void **state)
{
    (void)state;
    fx_folder fx;
    td_checkpoint *ck;
    open_small(&fx, 4, NULL, &ck);
    td_checkpoint_close(ck);
    expect_info(0, fx.dir, NULL,
                SAYS("5: 4 KDA, 1 DSA (3), and an MTP layer", "3 of width 256, 2 chosen, 2 shared",
                     "EXL3, 4 bits, codebook mcg", "routed experts", "rank 1", "Nothing would be refused."));
    char *text = run_info(0, fx.dir, "--json");
    json_t *root = json_loads(text, 0, NULL);
    assert_non_null(root);
    assert_true(json_is_true(json_object_get(root, "served")));
    json_t *bytes = json_object_get(root, "bytes"), *experts = json_object_get(bytes, "routed_experts");
    /* 4 layers * 3 experts * 3 matrices of 256 x 256: 32,768 of trellis, 1,024 of scales, 4 of marker */
    assert_int_equal(json_integer_value(json_object_get(experts, "bytes")), 36 * 33796);
    /* gate and up: half the trellis, all of suh, half of svh; down: half, half, all */
    assert_int_equal(json_integer_value(json_array_get(json_object_get(experts, "rank_bytes"), 1)), 36 * 17156);
    json_decref(root);
    free(text);
    fx_destroy(&fx);

    open_small(&fx, 4, two_wrong, &ck);
    td_checkpoint_close(ck);
    expect_info(1, fx.dir, NULL, SAYS("Refused, 2 problems:", "e_score_correction_bias: dtype BF16", "mcg is missing"));
    fx_write_text(&fx, "config.json", "{\"model_type\": \"llama\"}");
    expect_info(1, fx.dir, NULL,
                SAYS("not a checkpoint that tandem serves", "model_type: \"llama\", must be", "in 3 files"));
    expect_info(1, fx.dir, "--json", SAYS("\"served\":false", "\"n_problems\":1", "\"container\""));
    fx_destroy(&fx);
    expect_info(1, "/nonexistent", NULL, SAYS("/nonexistent/config.json: No such file or directory"));
    expect_info(0, "--help", NULL, SAYS("usage: tandem info DIR [--json]", "exit code"));
    free(run_info(2, NULL, NULL));
    free(run_info(2, "--what", NULL));
    free(run_info(2, "a", "b"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges), cmocka_unit_test(test_shard),          cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_slices), cmocka_unit_test(test_verify),         cmocka_unit_test(test_verify_experts),
        cmocka_unit_test(test_marker), cmocka_unit_test(test_published_size), cmocka_unit_test(test_info),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
