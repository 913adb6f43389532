/* Raw weights on their way to the GPU, in pieces. There are two: while the GPU copies and packs one, the host fills the
 * other from the checkpoint, so loading takes as long as the slower of the two and not both. The host's half of a piece
 * is pinned; the driver would otherwise copy through pinned memory of its own and hold the caller meanwhile.
 *
 * Copy and packing of a piece are enqueued on the device's one stream, so pieces are packed in order; only the filling
 * overlaps. What goes wrong with a kernel shows at the next td_dev_sync(). */
#include "ops/cuda/cuda.h"
#include "ops/host_copy.h"

td_status td_cuda_pieces_create(td_cuda_dev *dev, td_error *err)
{
    void *device = NULL, *host = NULL;
    td_status status = td_dev_alloc(&dev->base, TD_PIECES * (size_t)TD_PIECE_BYTES, &device, err);
    dev->staging = (unsigned char *)device;
    if (status == TD_OK) status = td_dev_host_alloc(&dev->base, TD_PIECES * (size_t)TD_PIECE_BYTES, &host, err);
    dev->staging_host = (unsigned char *)host;
    for (int i = 0; i < TD_PIECES && status == TD_OK; i++) {
        td_cuda_piece *piece = &dev->pieces[i];
        piece->device = dev->staging + i * (size_t)TD_PIECE_BYTES;
        piece->host = dev->staging_host + i * (size_t)TD_PIECE_BYTES;
        if (cudaEventCreateWithFlags(&piece->done, cudaEventDisableTiming) != cudaSuccess) {
            cudaGetLastError();
            status = td_fail(err, TD_ENOMEM, "GPU %d: no memory for an event", dev->index);
        }
    }
    return status;
}

void td_cuda_pieces_destroy(td_cuda_dev *dev)
{
    if (dev->hung) return;
    for (int i = 0; i < TD_PIECES; i++)
        if (dev->pieces[i].done) cudaEventDestroy(dev->pieces[i].done);
    cudaFree(dev->staging);
    cudaFreeHost(dev->staging_host);
}

td_status td_cuda_piece_next(td_cuda_dev *dev, td_cuda_piece **out)
{
    td_cuda_piece *piece = &dev->pieces[dev->next_piece];
    td_status status = td_cuda_wait(dev, piece->done, "packing weights");
    dev->next_piece = (dev->next_piece + 1) % TD_PIECES;
    *out = piece;
    return status;
}

td_status td_cuda_piece_send(td_cuda_dev *dev, const td_cuda_piece *piece, size_t n_bytes)
{
    return td_cuda_done(dev, cudaMemcpyAsync(piece->device, piece->host, n_bytes, cudaMemcpyHostToDevice, dev->stream),
                        "sending weights");
}

td_status td_cuda_piece_rows(td_cuda_dev *dev, const void *from, size_t from_stride, size_t row_bytes, size_t n_rows,
                             td_cuda_piece **out)
{
    td_status status = td_cuda_piece_next(dev, out);
    if (status != TD_OK) return status;
    if (td_cuda_on_device(from))
        return td_cuda_done(dev,
                            cudaMemcpy2DAsync((*out)->device, row_bytes, from, from_stride, row_bytes, n_rows,
                                              cudaMemcpyDeviceToDevice, dev->stream),
                            "sending weights");
    td_host_copy_rows((*out)->host, from, from_stride, row_bytes, n_rows);
    return td_cuda_piece_send(dev, *out, n_rows * row_bytes);
}

td_status td_cuda_piece_done(td_cuda_dev *dev, td_cuda_piece *piece, const char *op)
{
    td_status status = td_cuda_launched(dev, op);
    return status == TD_OK ? td_cuda_done(dev, cudaEventRecord(piece->done, dev->stream), op) : status;
}

bool td_cuda_on_device(const void *memory)
{
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    return attributes.type == cudaMemoryTypeDevice;
}
