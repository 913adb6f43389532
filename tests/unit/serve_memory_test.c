/* What fits where: two memories or one, and the largest window of a budget, on the bundled checkpoint. A GPU is made up:
 * nothing here touches one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/serve_memory.h"

#include <string.h>

#define MIB ((size_t)1 << 20)

static td_settings parse(int argc, char **argv)
{
    td_settings settings;
    td_error err;
    if (td_settings_parse(td_serve_settings, td_n_serve_settings, argc, argv, &settings, &err))
        fail_msg("%s", err.text);
    return settings;
}

static void test_places(void **state)
{
    (void)state;
    td_serve_shape shape = { .backend = TD_CUDA };
    td_serve_memory need = { 100, 10 };
    assert_false(td_serve_one_memory(&shape));
    assert_true(td_serve_fits(&shape, &need, &(td_serve_memory){ 100, 10 }));
    assert_false(td_serve_fits(&shape, &need, &(td_serve_memory){ 99, 1000 }));
    assert_false(td_serve_fits(&shape, &need, &(td_serve_memory){ 1000, 9 }));
    shape.gpu.integrated = true;
    assert_true(td_serve_one_memory(&shape));
    assert_true(td_serve_fits(&shape, &need, &(td_serve_memory){ 0, 110 }));
    assert_false(td_serve_fits(&shape, &need, &(td_serve_memory){ 1000, 109 }));
    shape.backend = TD_CPU;
    assert_true(td_serve_one_memory(&shape));
}

static void test_available(void **state)
{
    (void)state;
    char *one[] = { "serve", "--model", "models/demo" };
    char *two[] = { "serve", "--model", "models/demo", "--world", "2" };
    char *far[] = { "serve", "--model", "models/demo", "--world", "2", "--master", "10.0.0.1" };
    td_settings alone = parse(3, one), here = parse(5, two), apart = parse(7, far);
    td_serve_shape shape = {
        .backend = TD_CUDA, .reserve_bytes = 100 * MIB, .model = { .world = 1 }, .gpu_is_shared = true
    };
    shape.gpu.free_bytes = 1100 * MIB;
    assert_int_equal(td_serve_available(&shape, &alone).device_bytes, 1000 * MIB);
    shape.model.world = 2;
    assert_int_equal(td_serve_available(&shape, &here).device_bytes, 500 * MIB);
    assert_int_equal(td_serve_available(&shape, &apart).device_bytes, 1000 * MIB);
    shape.gpu_is_shared = false;
    assert_int_equal(td_serve_available(&shape, &here).device_bytes, 1000 * MIB);
    shape.gpu.free_bytes = 50 * MIB;
    assert_int_equal(td_serve_available(&shape, &apart).device_bytes, 0);
    shape.gpu.integrated = true;
    td_serve_memory shared = td_serve_available(&shape, &apart);
    assert_true(shared.device_bytes == 0 && shared.host_bytes > 0);
}

static void test_gpus(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t gpus[2];
    } good[] = { { "0", { 0, 0 } }, { "3", { 3, 3 } }, { "0,1", { 0, 1 } }, { "1,0", { 1, 0 } }, { "63", { 63, 63 } } };
    static const char *const bad[] = { "", "x", "0,", "64", "-1", "0,1,2", "0 1" };
    char *argv[] = { "serve", "--model", "m", "--gpu", NULL };
    int64_t gpus[TD_SHARDS];
    td_error err;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        argv[4] = (char *)good[i].text;
        td_settings settings = parse(5, argv);
        assert_int_equal(td_serve_gpus(&settings, gpus, &err), TD_OK);
        assert_memory_equal(gpus, good[i].gpus, sizeof gpus);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        argv[4] = (char *)bad[i];
        td_settings settings = parse(5, argv);
        assert_int_equal(td_serve_gpus(&settings, gpus, &err), TD_EINVAL);
        assert_non_null(strstr(err.text, "--gpu"));
    }
}

/* The largest window of exactly what a window needs is that window; of a byte less it is a block shorter. */
static void test_largest(void **state)
{
    (void)state;
    char *argv[] = { "serve", "--model", "models/demo", "--backend", "cpu", "--context", "8192" };
    td_settings settings = parse(7, argv);
    td_checkpoint *checkpoint;
    td_serve_shape shape, shorter;
    td_serve_need need;
    td_error err;
    int32_t largest;
    if (td_checkpoint_open("models/demo", &checkpoint, &err)) fail_msg("%s", err.text);
    assert_int_equal(td_serve_shape_of(&settings, td_checkpoint_config(checkpoint), &shape, &err), TD_OK);
    shorter = shape;
    td_serve_set_context(&shorter, &settings, 4096);
    assert_int_equal(td_serve_need_of(&shorter, checkpoint, &need, &err), TD_OK);
    assert_int_equal(need.memory.device_bytes, 0);
    assert_int_equal(td_serve_largest(&shape, checkpoint, &need.memory, &largest, &err), TD_OK);
    assert_int_equal(largest, 4096);
    need.memory.host_bytes--;
    assert_int_equal(td_serve_largest(&shape, checkpoint, &need.memory, &largest, &err), TD_OK);
    assert_int_equal(largest, 4096 - TD_BLOCK);
    assert_int_equal(td_serve_largest(&shape, checkpoint, &(td_serve_memory){ 0, 0 }, &largest, &err), TD_OK);
    assert_int_equal(largest, 0);
    /* memory that could not be had although the machine says that it is free: the answer is smaller all the same */
    assert_int_equal(td_serve_need_of(&shape, checkpoint, &need, &err), TD_OK);
    assert_int_equal(td_serve_refit(&shape, &settings, checkpoint, &need.memory, &largest, &err), TD_OK);
    assert_in_range(largest, 4096, 8192 - TD_BLOCK);
    td_serve_need less;
    td_serve_set_context(&shape, &settings, largest);
    assert_int_equal(td_serve_need_of(&shape, checkpoint, &less, &err), TD_OK);
    assert_true(less.memory.host_bytes <= need.memory.host_bytes - need.memory.host_bytes / 8);
    td_checkpoint_close(checkpoint);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_available),
        cmocka_unit_test(test_gpus),
        cmocka_unit_test(test_largest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
