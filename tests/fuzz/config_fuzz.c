/* config.json of any bytes; a zero byte separates it from a generation_config.json. What is accepted must be safe to
 * plan with: layouts and cuts are computed for it. */
#include "checkpoint/slices.h"

#include <stdint.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static td_status check_role(void *user, const td_role *role)
{
    (void)user;
    td_range low = td_role_range(role, 0, TD_SHARDS), high = td_role_range(role, 1, TD_SHARDS);
    td_check(td_range_n(low) > 0 && td_range_n(high) > 0 && td_range_n(high) <= td_range_n(low));
    td_check(role->split == TD_SPLIT_REPLICATED || low.end == high.begin);
    return TD_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const uint8_t *zero = n_bytes ? memchr(data, 0, n_bytes) : NULL;
    size_t config_bytes = zero ? (size_t)(zero - data) : n_bytes;
    td_config config;
    td_error err;
    if (td_config_parse("config.json", data, config_bytes, "generation_config.json", zero ? zero + 1 : NULL,
                        zero ? n_bytes - config_bytes - 1 : 0, &config, &err) != TD_OK)
        return 0;
    td_check(config.n_layers + config.n_mtp <= TD_LAYERS_MAX && config.top_k <= config.n_experts);
    td_check(config.n_eos <= TD_EOS_MAX && config.index_topk % config.index_kpool == 0);
    for (int i = 0; i < config.n_eos; i++) td_check(config.eos[i] >= 0 && config.eos[i] < config.vocab_size);
    td_roles_each(&config, check_role, NULL);
    td_vision_roles_each(&config, check_role, NULL);
    return 0;
}
