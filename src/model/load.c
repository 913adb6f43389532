/* Filling the weights: the description of weights.c run over the memory that the layout took. A tensor's pages are read
 * once, packed, and given back, so that a rank never holds its weights twice. A checkpoint of shapes is filled from its
 * pool of values (stand_in.h). */
#include "model/builder.h"

td_status td_model_load(td_model *m, const td_checkpoint *ck, td_progress_fn *progress, void *user, td_error *err)
{
    td_builder b = { .dev = m->dev, .ops = m->ops, .ck = ck, .meta = &m->meta, .err = err };
    const td_model_plan *plan = &m->plan;
    b.stand_in.values = td_checkpoint_values(ck);
    if (!b.stand_in.values && !td_checkpoint_at(ck, 0)->data)
        return td_fail(err, TD_EINVAL, "%s has nothing to load", td_checkpoint_dir(ck));
    b.progress = progress;
    b.user = user;
    b.total_bytes =
        (uint64_t)plan->experts_bytes + plan->dense_bytes + plan->embed_bytes + plan->head_bytes + plan->mtp_bytes;
    td_build_weights(&b, m);
    td_checkpoint_release_pages(ck);
    td_builder_deinit(&b);
    td_check(b.status || b.done_bytes == b.total_bytes);
    return b.status;
}
