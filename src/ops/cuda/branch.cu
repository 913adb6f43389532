/* What runs beside the main line: a stream a branch, events where it leaves and where it ends, recorded as edges of the
 * graph. There are two: the caller's (ops/dev.h "Side by side"), and an operation's own for what only a later one of
 * its kind reads. A branch's first kernel waits for the whole kernel before it; the one after the join is set up early
 * as ever and waits for both lines, so before its td_begin() it may read nothing that the branch wrote. */
#include "ops/cuda/cuda.h"

static td_status branch_off(td_cuda_dev *dev, td_cuda_branch *b)
{
    td_status status = td_cuda_done(dev, cudaEventRecord(b->forked, dev->stream), "forking");
    if (status == TD_OK) status = td_cuda_done(dev, cudaStreamWaitEvent(b->stream, b->forked, 0), "forking");
    if (status != TD_OK) return status;
    b->main = dev->stream;
    b->scratch = dev->scratch;
    b->open = true;
    dev->stream = b->stream;
    dev->scratch = NULL;
    dev->crossed = true;
    return TD_OK;
}

static td_status leave_branch(td_cuda_dev *dev, td_cuda_branch *b)
{
    dev->stream = b->main;
    dev->scratch = b->scratch;
    dev->crossed = false;
    b->main = NULL;
    return td_cuda_done(dev, cudaEventRecord(b->ended, b->stream), "forking");
}

/* After a failure it may be that operations still go to the branch. */
static td_status join_branch(td_cuda_dev *dev, td_cuda_branch *b)
{
    td_status status = b->main ? leave_branch(dev, b) : TD_OK;
    if (!b->open) return status;
    b->open = false;
    return td_cuda_done(dev, cudaStreamWaitEvent(dev->stream, b->ended, 0), "joining");
}

td_status td_cuda_fork(td_dev *base)
{
    td_cuda_dev *dev = td_cuda(base);
    return dev->branch.open ? TD_EINVAL : branch_off(dev, &dev->branch);
}

td_status td_cuda_main(td_dev *base)
{
    td_cuda_dev *dev = td_cuda(base);
    return dev->branch.main ? leave_branch(dev, &dev->branch) : TD_EINVAL;
}

td_status td_cuda_join(td_dev *base)
{
    td_cuda_dev *dev = td_cuda(base);
    return dev->branch.open && !dev->branch.main ? join_branch(dev, &dev->branch) : TD_EINVAL;
}

void td_cuda_aside(td_cuda_dev *dev)
{
    td_cuda_catch_up(dev);
    branch_off(dev, &dev->aside);
}

void td_cuda_aside_end(td_cuda_dev *dev)
{
    if (dev->aside.main) leave_branch(dev, &dev->aside);
}

void td_cuda_catch_up(td_cuda_dev *dev)
{
    join_branch(dev, &dev->aside);
}

/* ---- all of them ---- */

void td_cuda_join_all(td_cuda_dev *dev)
{
    join_branch(dev, &dev->branch);
    join_branch(dev, &dev->aside);
}

static td_status create(td_cuda_dev *dev, td_cuda_branch *b)
{
    td_status status = td_cuda_done(dev, cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking), "a stream");
    cudaEvent_t *events[] = { &b->forked, &b->ended };
    for (int i = 0; i < 2 && status == TD_OK; i++)
        status = td_cuda_done(dev, cudaEventCreateWithFlags(events[i], cudaEventDisableTiming), "an event");
    return status;
}

static void destroy(td_cuda_branch *b)
{
    if (b->forked) cudaEventDestroy(b->forked);
    if (b->ended) cudaEventDestroy(b->ended);
    if (b->stream) cudaStreamDestroy(b->stream);
}

td_status td_cuda_branches_create(td_cuda_dev *dev)
{
    td_status status = create(dev, &dev->branch);
    return status == TD_OK ? create(dev, &dev->aside) : status;
}

void td_cuda_branches_destroy(td_cuda_dev *dev)
{
    td_cuda_join_all(dev);
    destroy(&dev->branch);
    destroy(&dev->aside);
}
