/* Frames: what travels on the control and step connections. 32 bytes of head, then the payload; little endian.
 *
 *     0  magic "TDLK"        4  protocol u16      6  type u16
 *     8  sequence u32       12  payload bytes u32
 *    16  generation u64     24  FNV-1a-64 of bytes 0..23 and the payload
 *
 * The head's layout and the magic never change, so that two programs of different protocols can say so. The checksum
 * catches a mix-up of our own (ranks out of step, a torn write); it is no defence against an attacker. */
#ifndef TD_LINK_MESSAGE_H
#define TD_LINK_MESSAGE_H

#include "base/status.h"

TD_BEGIN_C

#define TD_LINK_PROTOCOL     1
#define TD_FRAME_HEAD_BYTES  32
#define TD_FRAME_CONTROL_MAX ((size_t)64 << 10) /* payload bytes of any frame but a step message */

typedef enum td_frame_type {
    TD_FRAME_HELLO = 1, /* rank 1 -> 0: identity text (handshake.h) */
    TD_FRAME_WELCOME,   /* rank 0 -> 1: identity text; the head's generation is the pair's from here on */
    TD_FRAME_REFUSE,    /* rank 0 -> 1: 1 byte td_refusal, text */
    TD_FRAME_JOIN,      /* rank 1 -> 0: first frame of the step connection */
    TD_FRAME_ADDRESS,   /* both: UCX worker address */
    TD_FRAME_BEAT,      /* both: alive */
    TD_FRAME_PROGRESS,  /* both: done u64, total u64 */
    TD_FRAME_BARRIER,   /* both: number u32, label */
    TD_FRAME_STOP,      /* both: this rank stops, no fault */
    TD_FRAME_FAILURE,   /* both: this rank ends; text */
    TD_FRAME_STEP,      /* rank 0 -> 1: a step message */
    TD_FRAME_TYPES
} td_frame_type;

typedef enum td_refusal { TD_REFUSE_DIFFERS = 1, TD_REFUSE_FORMED = 2 } td_refusal;

typedef struct td_frame {
    uint16_t protocol, type;
    uint32_t seq, n_bytes;
    uint64_t generation, checksum;
} td_frame;

/* The head of a frame around payload. */
void td_frame_write(uint8_t head[TD_FRAME_HEAD_BYTES], td_frame_type type, uint32_t seq, uint64_t generation,
                    const void *payload, size_t n_bytes);

/* TD_EFORMAT: no frame of ours, or larger than its type may be. TD_EUNSUPPORTED: another protocol (frame->protocol is
 * set, and nothing else is to be trusted). */
td_status td_frame_parse(const uint8_t head[TD_FRAME_HEAD_BYTES], td_frame *frame, td_error *err);

/* Does the payload belong to the head? TD_EFORMAT when not. */
td_status td_frame_verify(const uint8_t head[TD_FRAME_HEAD_BYTES], const td_frame *frame, const void *payload,
                          td_error *err);

/* Cuts a stream of bytes into frames, for frames of at most TD_FRAME_CONTROL_MAX:
 *     write to td_frame_space(..), td_frame_added(n), then td_frame_next until TD_EAGAIN.
 * A frame's payload lies in the reader and is good until the next call. */
typedef struct td_frame_reader {
    uint8_t *buf;
    size_t cap_bytes, used_bytes, taken_bytes;
    unsigned allowed; /* bit t: frames of type t may come */
} td_frame_reader;

td_status td_frame_reader_init(td_frame_reader *reader, size_t payload_max, unsigned allowed);
void td_frame_reader_deinit(td_frame_reader *reader);
void *td_frame_space(td_frame_reader *reader, size_t *n_bytes); /* *n_bytes > 0 after td_frame_next said TD_EAGAIN */
void td_frame_added(td_frame_reader *reader, size_t n_bytes);
td_status td_frame_next(td_frame_reader *reader, td_frame *frame, const uint8_t **payload, td_error *err);

/* Numbers in payloads. */
void td_put_u32(uint8_t *to, uint32_t value);
void td_put_u64(uint8_t *to, uint64_t value);
uint32_t td_get_u32(const uint8_t *from);
uint64_t td_get_u64(const uint8_t *from);

/* Bytes from the peer as text for a person: at most cap - 1, control bytes and all above 0x7e become '?'. */
void td_printable(char *to, size_t cap, const void *from, size_t n_bytes);

TD_END_C
#endif
