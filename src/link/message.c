/* See message.h. Every size is checked against its type's limit before a byte of payload is waited for, so a hostile
 * length can neither allocate nor stall. */
#include "link/message.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "link/link.h"

static const uint8_t magic[4] = { 'T', 'D', 'L', 'K' };

static const struct {
    const char *name;
    uint32_t min_bytes, max_bytes;
} types[TD_FRAME_TYPES] = {
    [TD_FRAME_HELLO] = { "hello", 1, 32 << 10 },
    [TD_FRAME_WELCOME] = { "welcome", 1, 32 << 10 },
    [TD_FRAME_REFUSE] = { "refuse", 1, 2048 },
    [TD_FRAME_JOIN] = { "join", 0, 0 },
    [TD_FRAME_ADDRESS] = { "address", 1, 64 << 10 },
    [TD_FRAME_BEAT] = { "beat", 0, 0 },
    [TD_FRAME_PROGRESS] = { "progress", 16, 16 },
    [TD_FRAME_BARRIER] = { "barrier", 4, 4 + TD_LINK_LABEL_MAX },
    [TD_FRAME_STOP] = { "stop", 0, 0 },
    [TD_FRAME_FAILURE] = { "failure", 0, 1024 },
    [TD_FRAME_STEP] = { "step", 0, TD_LINK_STEP_MAX },
};

void td_put_u32(uint8_t *to, uint32_t value)
{
    for (int i = 0; i < 4; i++) to[i] = (uint8_t)(value >> (8 * i));
}

void td_put_u64(uint8_t *to, uint64_t value)
{
    for (int i = 0; i < 8; i++) to[i] = (uint8_t)(value >> (8 * i));
}

uint32_t td_get_u32(const uint8_t *from)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) value |= (uint32_t)from[i] << (8 * i);
    return value;
}

uint64_t td_get_u64(const uint8_t *from)
{
    return (uint64_t)td_get_u32(from) | (uint64_t)td_get_u32(from + 4) << 32;
}

static uint16_t get_u16(const uint8_t *from)
{
    return (uint16_t)(from[0] | from[1] << 8);
}

static uint64_t checksum_of(const uint8_t *head, const void *payload, size_t n_bytes)
{
    return td_fnv1a(td_fnv1a(TD_FNV1A_START, head, 24), payload, n_bytes);
}

void td_frame_write(uint8_t head[TD_FRAME_HEAD_BYTES], td_frame_type type, uint32_t seq, uint64_t generation,
                    const void *payload, size_t n_bytes)
{
    td_check(type > 0 && type < TD_FRAME_TYPES);
    td_check(n_bytes >= types[type].min_bytes && n_bytes <= types[type].max_bytes);
    memcpy(head, magic, sizeof magic);
    head[4] = TD_LINK_PROTOCOL & 0xff;
    head[5] = TD_LINK_PROTOCOL >> 8;
    head[6] = (uint8_t)type;
    head[7] = 0;
    td_put_u32(head + 8, seq);
    td_put_u32(head + 12, (uint32_t)n_bytes);
    td_put_u64(head + 16, generation);
    td_put_u64(head + 24, checksum_of(head, payload, n_bytes));
}

td_status td_frame_parse(const uint8_t head[TD_FRAME_HEAD_BYTES], td_frame *frame, td_error *err)
{
    if (memcmp(head, magic, sizeof magic) != 0) return td_fail(err, TD_EFORMAT, "not a tandem control message");
    td_frame f = { .protocol = get_u16(head + 4),
                   .type = get_u16(head + 6),
                   .seq = td_get_u32(head + 8),
                   .n_bytes = td_get_u32(head + 12),
                   .generation = td_get_u64(head + 16),
                   .checksum = td_get_u64(head + 24) };
    if (f.protocol != TD_LINK_PROTOCOL) {
        frame->protocol = f.protocol;
        return td_fail(err, TD_EUNSUPPORTED, "the peer speaks link protocol %d, this program %d", f.protocol,
                       TD_LINK_PROTOCOL);
    }
    if (f.type == 0 || f.type >= TD_FRAME_TYPES)
        return td_fail(err, TD_EFORMAT, "control message of unknown type %d", f.type);
    if (f.n_bytes < types[f.type].min_bytes || f.n_bytes > types[f.type].max_bytes)
        return td_fail(err, TD_EFORMAT, "%s message of %u bytes, allowed are %u to %u", types[f.type].name, f.n_bytes,
                       types[f.type].min_bytes, types[f.type].max_bytes);
    *frame = f;
    return TD_OK;
}

td_status td_frame_verify(const uint8_t head[TD_FRAME_HEAD_BYTES], const td_frame *frame, const void *payload,
                          td_error *err)
{
    uint64_t sum = checksum_of(head, payload, frame->n_bytes);
    if (sum == frame->checksum) return TD_OK;
    return td_fail(err, TD_EFORMAT, "%s message %u of %u bytes: checksum %016llx, its head says %016llx",
                   types[frame->type].name, frame->seq, frame->n_bytes, (unsigned long long)sum,
                   (unsigned long long)frame->checksum);
}

td_status td_frame_reader_init(td_frame_reader *reader, size_t payload_max, unsigned allowed)
{
    *reader = (td_frame_reader){ .cap_bytes = TD_FRAME_HEAD_BYTES + payload_max, .allowed = allowed };
    reader->buf = malloc(reader->cap_bytes);
    return reader->buf ? TD_OK : TD_ENOMEM;
}

void td_frame_reader_deinit(td_frame_reader *reader)
{
    free(reader->buf);
    *reader = (td_frame_reader){ 0 };
}

static void drop_taken(td_frame_reader *reader)
{
    if (reader->taken_bytes == 0) return;
    reader->used_bytes -= reader->taken_bytes;
    memmove(reader->buf, reader->buf + reader->taken_bytes, reader->used_bytes);
    reader->taken_bytes = 0;
}

void *td_frame_space(td_frame_reader *reader, size_t *n_bytes)
{
    drop_taken(reader);
    *n_bytes = reader->cap_bytes - reader->used_bytes;
    return reader->buf + reader->used_bytes;
}

void td_frame_added(td_frame_reader *reader, size_t n_bytes)
{
    td_check(n_bytes <= reader->cap_bytes - reader->used_bytes);
    reader->used_bytes += n_bytes;
}

td_status td_frame_next(td_frame_reader *reader, td_frame *frame, const uint8_t **payload, td_error *err)
{
    drop_taken(reader);
    /* A wrong first byte is enough to know: garbage shorter than a head must not be waited on. */
    size_t n_magic = reader->used_bytes < sizeof magic ? reader->used_bytes : sizeof magic;
    if (memcmp(reader->buf, magic, n_magic) != 0) return td_fail(err, TD_EFORMAT, "not a tandem control message");
    if (reader->used_bytes < TD_FRAME_HEAD_BYTES) return TD_EAGAIN;

    td_frame f = { 0 };
    td_status status = td_frame_parse(reader->buf, &f, err);
    if (status == TD_EUNSUPPORTED) frame->protocol = f.protocol;
    if (status != TD_OK) return status;
    if (!(reader->allowed >> f.type & 1))
        return td_fail(err, TD_EFORMAT, "%s message where none may come", types[f.type].name);
    if (f.n_bytes > reader->cap_bytes - TD_FRAME_HEAD_BYTES)
        return td_fail(err, TD_EFORMAT, "%s message of %u bytes is too large here", types[f.type].name, f.n_bytes);
    if (reader->used_bytes < TD_FRAME_HEAD_BYTES + f.n_bytes) return TD_EAGAIN;

    const uint8_t *body = reader->buf + TD_FRAME_HEAD_BYTES;
    status = td_frame_verify(reader->buf, &f, body, err);
    if (status != TD_OK) return status;
    reader->taken_bytes = TD_FRAME_HEAD_BYTES + f.n_bytes;
    *frame = f;
    *payload = body;
    return TD_OK;
}

void td_printable(char *to, size_t cap, const void *from, size_t n_bytes)
{
    const uint8_t *bytes = from;
    size_t n = n_bytes < cap - 1 ? n_bytes : cap - 1;
    for (size_t i = 0; i < n; i++) to[i] = bytes[i] >= 0x20 && bytes[i] <= 0x7e ? (char)bytes[i] : '?';
    to[n] = 0;
}
