/* Bytes on the control port: cut into pieces as the first byte says, read as frames, and every payload taken as what
 * its type says it is. Nothing may crash, and no frame may come out that does not verify. */
#include <stdint.h>
#include <string.h>

#include "link/handshake.h"
#include "link/message.h"

static const char own[] = "@world=2\n@rank=0\n@build=b\n@checkpoint=c\nkv=fp8\n";

static void use(const td_frame *frame, const uint8_t *payload)
{
    td_error err;
    char text[64];
    td_check(frame->type > 0 && frame->type < TD_FRAME_TYPES && frame->n_bytes <= TD_FRAME_CONTROL_MAX);
    td_printable(text, sizeof text, payload, frame->n_bytes);
    td_check(strlen(text) < sizeof text);
    if (td_identity_check((const char *)payload, frame->n_bytes, &err) == TD_OK)
        (void)td_identity_compare(own, sizeof own - 1, 0, (const char *)payload, frame->n_bytes, 1, &err);
}

/* The checksum would keep the fuzzer out: a second run sets it right in every head it can find. */
static void read_all(const uint8_t *data, size_t size, size_t piece, bool repair)
{
    td_frame_reader reader;
    td_frame frame;
    const uint8_t *payload;
    td_error err;
    td_status status = TD_EAGAIN;
    if (td_frame_reader_init(&reader, 2048, ~0u) != TD_OK) return;
    while (size > 0 && status == TD_EAGAIN) {
        size_t space, n = size < piece ? size : piece;
        uint8_t *to = td_frame_space(&reader, &space);
        td_check(space > 0);
        if (n > space) n = space;
        memcpy(to, data, n);
        td_frame_added(&reader, n);
        data += n;
        size -= n;
        if (repair && reader.used_bytes >= TD_FRAME_HEAD_BYTES && td_frame_parse(reader.buf, &frame, NULL) == TD_OK &&
            frame.n_bytes <= reader.used_bytes - TD_FRAME_HEAD_BYTES)
            td_frame_write(reader.buf, (td_frame_type)frame.type, frame.seq, frame.generation,
                           reader.buf + TD_FRAME_HEAD_BYTES, frame.n_bytes);
        while ((status = td_frame_next(&reader, &frame, &payload, &err)) == TD_OK) use(&frame, payload);
    }
    td_frame_reader_deinit(&reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_error err;
    if (size < 1) return 0;
    size_t piece = data[0] ? data[0] : 256;
    read_all(data + 1, size - 1, piece, false);
    read_all(data + 1, size - 1, piece, true);
    if (td_identity_check((const char *)data + 1, size - 1, &err) == TD_OK) {
        (void)td_identity_compare(own, sizeof own - 1, 0, (const char *)data + 1, size - 1, 1, &err);
        (void)td_identity_compare((const char *)data + 1, size - 1, 1, own, sizeof own - 1, 0, &err);
    }
    return 0;
}
