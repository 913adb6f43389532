/* ops/gpu.h: the words for GPUs that cannot be used or are lost, written out by hand: what was found, what to do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "ops/gpu.h"

#include <string.h>

#define ONLY_FOR(gpu, archs) td_gpu_no_code(gpu, archs, sizeof(archs) / sizeof *(archs), &err)

static void test_no_use(void **state)
{
    (void)state;
    td_error err;
    assert_int_equal(td_gpu_no_use(TD_GPU_OLD_DRIVER, "insufficient", 0, 13000, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "no NVIDIA driver is installed"));
    assert_int_equal(td_gpu_no_use(TD_GPU_OLD_DRIVER, "insufficient", 12040, 13010, &err), TD_EUNSUPPORTED);
    assert_string_equal(err.text,
                        "the NVIDIA driver is too old: it is for CUDA 12.4, this build needs CUDA 13.1; update "
                        "the driver");
    assert_int_equal(td_gpu_no_use(0, "no error", 13000, 13000, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "lists no GPU"));
    assert_int_equal(td_gpu_no_use(TD_GPU_NONE, "no device", 13000, 13000, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "lists no GPU"));
    assert_int_equal(td_gpu_no_use(TD_GPU_DRIVER_MISMATCH, "mismatch", 13000, 13000, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "restart the machine"));
    assert_int_equal(td_gpu_no_use(304, "OS call failed", 13000, 13000, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "OS call failed (error 304)"));
}

static void test_no_such(void **state)
{
    (void)state;
    td_error err;
    assert_int_equal(td_gpu_no_such(1, 1, &err), TD_EINVAL);
    assert_string_equal(err.text, "there is no GPU 1; the driver lists one, number 0");
    assert_int_equal(td_gpu_no_such(8, 4, &err), TD_EINVAL);
    assert_string_equal(err.text, "there is no GPU 8; the driver lists 4, numbers 0 to 3");
}

/* Code for sm_XY runs on cards of generation X from Y on. */
static void test_runs(void **state)
{
    (void)state;
    static const int both[] = { 90, 121 };
    assert_true(td_gpu_runs(both, 2, 90) && td_gpu_runs(both, 2, 121));
    assert_false(td_gpu_runs(both, 2, 80) || td_gpu_runs(both, 2, 100) || td_gpu_runs(both, 2, 120));
    assert_true(td_gpu_runs((const int[]){ 80 }, 1, 86));
    assert_false(td_gpu_runs((const int[]){ 86 }, 1, 80) || td_gpu_runs(both, 0, 90));
}

static void test_no_code(void **state)
{
    (void)state;
    static const int both[] = { 90, 121 }, one[] = { 121 };
    td_error err;
    td_gpu gpu = { .index = 2, .name = "NVIDIA A100", .capability = 80 };
    assert_int_equal(ONLY_FOR(&gpu, both), TD_EUNSUPPORTED);
    assert_string_equal(err.text, "GPU 2 (NVIDIA A100) is sm_80, this build has code for sm_90, sm_121 only "
                                  "(-DTD_CUDA_ARCHS=80 makes one for it)");
    assert_int_equal(ONLY_FOR(&gpu, one), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "code for sm_121 only"));
}

static void test_no_start(void **state)
{
    (void)state;
    td_error err;
    assert_int_equal(td_gpu_no_start(0, TD_GPU_NO_MEMORY, "out of memory", &err), TD_ENOMEM);
    assert_non_null(strstr(err.text, "other programs have taken its memory"));
    assert_int_equal(td_gpu_no_start(0, TD_GPU_UNAVAILABLE, "busy", &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "another program has it for itself"));
    assert_int_equal(td_gpu_no_start(3, 401, "what", &err), TD_EUNSUPPORTED);
    assert_string_equal(err.text, "GPU 3 cannot be used: what (error 401)");
}

static void test_failed(void **state)
{
    (void)state;
    static const int lost[] = { TD_GPU_ECC, TD_GPU_ILLEGAL_ADDRESS, TD_GPU_TIMEOUT, TD_GPU_LAUNCH_FAILED,
                                TD_GPU_UNKNOWN };
    td_error err;
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++) {
        assert_int_equal(td_gpu_failed(1, "kda", lost[i], "bad", &err), TD_ECUDA);
        assert_non_null(strstr(err.text, "GPU 1 is lost: kda: bad (error "));
        assert_non_null(strstr(err.text, "sudo dmesg | grep Xid"));
    }
    assert_int_equal(td_gpu_failed(0, "linear", 1, "invalid argument", &err), TD_ECUDA);
    assert_string_equal(err.text, "GPU 0: linear: invalid argument (error 1)"); /* ours, no Xid to look for */
    assert_int_equal(td_gpu_failed(0, "recording", TD_GPU_NO_MEMORY, "out of memory", &err), TD_ENOMEM);
    assert_string_equal(err.text, "GPU 0: recording: out of memory");
    assert_int_equal(td_gpu_hung(0, "download", 30, &err), TD_ECUDA);
    assert_non_null(strstr(err.text, "GPU 0 hangs: download: what it was given has not ended for 30 s"));
}

static void test_granules(void **state)
{
    (void)state;
    assert_int_equal(td_gpu_granules(0), 0);
    assert_int_equal(td_gpu_granules(1), 2 << 20);
    assert_int_equal(td_gpu_granules(2 << 20), 2 << 20);
    assert_int_equal(td_gpu_granules((2 << 20) + 1), 4 << 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_use),   cmocka_unit_test(test_no_such),  cmocka_unit_test(test_runs),
        cmocka_unit_test(test_no_code),  cmocka_unit_test(test_no_start), cmocka_unit_test(test_failed),
        cmocka_unit_test(test_granules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
