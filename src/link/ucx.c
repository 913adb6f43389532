/* Two ranks over UCX: shared memory, TCP or RoCE behind one API.
 *
 * Ordering. Two UCX puts are not ordered, and the fence between them is a round trip with default settings. So
 * everything here is a tagged message: the receive completes when the bytes are in place, on every transport, by the
 * API's own promise.
 *
 * Tags. One kind for gathers and one for exchanges, a running number below. A receive matches its kind only and then
 * looks at the number and length that came: ranks out of step are an error at once, not a wait.
 *
 * What is owed. The worker belongs to the engine thread: nothing moves unless it calls progress. A send that TCP calls
 * done may still lie in UCX's buffer, and the peer would wait for it while this thread computes or sleeps. Flushing is
 * no way out: on TCP it is a round trip and needs the peer's progress in turn (measured: twice the latency, and a wait
 * without end when the peer blocks elsewhere). Instead: up to RNDV_THRESH bytes fit into the socket's send buffer,
 * which the peer has emptied, for it sent its gather k only after it had all of ours up to k-1; above, the rendezvous
 * protocol calls a send done when the peer has the bytes. What is left then is at most an acknowledgement, and a last
 * look at progress sends it.
 *
 * A dead peer is noticed by the control thread, also while this thread computes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "link/transport.h"

#define TAG_KIND_MASK (0xffull << 56)
#define TAG_GATHER    (1ull << 56)
#define TAG_EXCHANGE  (2ull << 56)

#define RNDV_THRESH "32k" /* at most what a fresh socket's send buffer holds; see above */

#define ADDRESS_TIMEOUT_MS 60000
#define VERDICT_MS         300  /* for the control thread to say what became of the peer */
#define CLOSE_MS           1000 /* for the endpoint to close */

typedef struct ucx {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h ep;
    ucp_mem_h memory;
    ucs_status_t broken; /* UCS_OK until the endpoint's error callback */
    uint64_t n_gathers;
    /* Of the gather and the exchange under way; what is left after a failure is close's to clean up. */
    void *recv, *send;
    void *piece_recv[TD_LINK_PIECES_MAX], *piece_send[TD_LINK_PIECES_MAX];
    bool endpoint_fails; /* UCX's own failure handling is on */
} ucx;

static void on_broken(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep;
    ((ucx *)arg)->broken = status;
}

/* The control thread knows better what became of the peer (stopped, ended, said why): it gets a moment first. */
static td_status broke(td_link *link, ucs_status_t status, const td_wait *wait, td_error *err)
{
    for (int i = 0; i < VERDICT_MS && td_control_health(link->control) == TD_LINK_UP; i++) td_sleep_ns(1000000);
    return td_control_lose(link->control, err, "rank %d: %s %llu: UCX says %s", td_control_peer(link->control),
                           wait->what, (unsigned long long)wait->number, ucs_status_string(status));
}

/* Is the request done? Returns UCS_INPROGRESS or its end, freed and *request NULL. info: of a receive, or NULL. */
static ucs_status_t look(void **request, ucp_tag_recv_info_t *info)
{
    if (!*request) return UCS_OK;
    ucs_status_t status = info ? ucp_tag_recv_request_test(*request, info) : ucp_request_check_status(*request);
    if (status == UCS_INPROGRESS) return status;
    ucp_request_free(*request);
    *request = NULL;
    return status;
}

static td_status wait_for(td_link *link, void **request, ucp_tag_recv_info_t *info, td_wait *wait, td_error *err)
{
    ucx *u = link->state;
    for (int looks = 1;; looks++) {
        ucs_status_t status = look(request, info);
        if (status == UCS_OK) return TD_OK;
        if (status == UCS_ERR_MESSAGE_TRUNCATED)
            return td_control_lose(link->control, err,
                                   "rank %d is out of step: in %s %llu it sent more bytes than this rank",
                                   td_control_peer(link->control), wait->what, (unsigned long long)wait->number);
        if (status != UCS_INPROGRESS) return broke(link, status, wait, err);
        if (u->broken != UCS_OK && td_control_health(link->control) == TD_LINK_UP)
            return broke(link, u->broken, wait, err);
        if (ucp_worker_progress(u->worker) != 0 || looks % 16 != 0) continue;
        td_status more = td_wait_more(wait, err);
        if (more != TD_OK) return more;
    }
}

static ucp_request_param_t param_for(const td_link *link, const void *at, size_t n_bytes)
{
    ucp_request_param_t param = { .op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE, .memory_type = UCS_MEMORY_TYPE_HOST };
    const unsigned char *byte = at;
    if (byte >= link->region && byte < link->region + link->region_bytes &&
        n_bytes <= (size_t)(link->region + link->region_bytes - byte)) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = ((ucx *)link->state)->memory;
    }
    return param;
}

/* Never completes on the spot: the length and tag of what came are asked of the request (UCX 1.13 fills in recv_info
 * only in some of the cases where there is none). */
static ucs_status_t post_recv(td_link *link, void *to, size_t n_bytes, uint64_t kind, void **request)
{
    ucx *u = link->state;
    ucp_request_param_t param = param_for(link, to, n_bytes);
    param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    ucs_status_ptr_t r = ucp_tag_recv_nbx(u->worker, to, n_bytes, kind, TAG_KIND_MASK, &param);
    if (UCS_PTR_IS_ERR(r)) return UCS_PTR_STATUS(r);
    *request = r;
    return UCS_OK;
}

static ucs_status_t post_send(td_link *link, const void *from, size_t n_bytes, uint64_t tag, void **request)
{
    ucx *u = link->state;
    ucp_request_param_t param = param_for(link, from, n_bytes);
    ucs_status_ptr_t r = ucp_tag_send_nbx(u->ep, from, n_bytes, tag, &param);
    if (UCS_PTR_IS_ERR(r)) return UCS_PTR_STATUS(r);
    *request = r;
    return UCS_OK;
}

static td_status check_came(td_link *link, const ucp_tag_recv_info_t *info, uint64_t kind, size_t n_bytes,
                            const td_wait *wait, td_error *err)
{
    if (info->sender_tag == (kind | wait->number) && info->length == n_bytes) return TD_OK;
    return td_control_lose(link->control, err,
                           "rank %d is out of step: in %s %llu of %zu bytes it sent number %llu, %zu bytes",
                           td_control_peer(link->control), wait->what, (unsigned long long)wait->number, n_bytes,
                           (unsigned long long)(info->sender_tag & ~TAG_KIND_MASK), info->length);
}

/* Until UCX has nothing left to do, and so nothing left to send: see "What is owed" at the head. */
static void ucx_progress(td_link *link)
{
    ucx *u = link->state;
    while (ucp_worker_progress(u->worker) != 0) continue;
}

static td_status ucx_gather(td_link *link, void *buf, size_t n_bytes, td_error *err)
{
    ucx *u = link->state;
    unsigned char *slots = buf;
    int peer = 1 - link->rank;
    ucp_tag_recv_info_t info = { 0 };
    td_wait wait = td_wait_start(link->control, "gather", ++u->n_gathers, link->warn_ms, link->late_ms);

    ucs_status_t posted = post_recv(link, slots + (size_t)peer * n_bytes, n_bytes, TAG_GATHER, &u->recv);
    if (posted == UCS_OK)
        posted = post_send(link, slots + (size_t)link->rank * n_bytes, n_bytes, TAG_GATHER | wait.number, &u->send);
    if (posted != UCS_OK) return broke(link, posted, &wait, err);
    td_status status = wait_for(link, &u->recv, &info, &wait, err);
    if (status == TD_OK) status = check_came(link, &info, TAG_GATHER, n_bytes, &wait, err);
    if (status == TD_OK) status = wait_for(link, &u->send, NULL, &wait, err);
    if (status == TD_OK) ucx_progress(link);
    return status;
}

static td_status ucx_exchange_start(td_link *link, td_exchange *x, const void *mine, size_t send_bytes,
                                    size_t send_piece_bytes, void *theirs, td_error *err)
{
    ucx *u = link->state;
    ucs_status_t posted = UCS_OK;
    td_wait wait = td_wait_start(link->control, "exchange", x->number, link->warn_ms, link->late_ms);
    for (int i = 0; i < x->n_recv && posted == UCS_OK; i++) {
        size_t at = (size_t)i * x->recv_piece_bytes, left = x->recv_bytes - at;
        size_t n = left < x->recv_piece_bytes ? left : x->recv_piece_bytes;
        posted = post_recv(link, (unsigned char *)theirs + at, n, TAG_EXCHANGE, &u->piece_recv[i]);
    }
    for (int i = 0; i < x->n_send && posted == UCS_OK; i++) {
        size_t at = (size_t)i * send_piece_bytes, left = send_bytes - at;
        size_t n = left < send_piece_bytes ? left : send_piece_bytes;
        posted = post_send(link, (const unsigned char *)mine + at, n, TAG_EXCHANGE | wait.number, &u->piece_send[i]);
    }
    if (posted != UCS_OK) return broke(link, posted, &wait, err);
    return TD_OK;
}

static td_status ucx_exchange_piece(td_link *link, td_exchange *x, int piece, td_error *err)
{
    ucx *u = link->state;
    ucp_tag_recv_info_t info = { 0 };
    size_t at = (size_t)piece * x->recv_piece_bytes, left = x->recv_bytes - at;
    size_t n = left < x->recv_piece_bytes ? left : x->recv_piece_bytes;
    td_wait wait = td_wait_start(link->control, "exchange", x->number, link->warn_ms, link->late_ms);
    td_status status = wait_for(link, &u->piece_recv[piece], &info, &wait, err);
    return status == TD_OK ? check_came(link, &info, TAG_EXCHANGE, n, &wait, err) : status;
}

static td_status ucx_exchange_sent(td_link *link, td_exchange *x, td_error *err)
{
    ucx *u = link->state;
    td_wait wait = td_wait_start(link->control, "the end of exchange", x->number, link->warn_ms, link->late_ms);
    for (int i = 0; i < x->n_send; i++) {
        td_status status = wait_for(link, &u->piece_send[i], NULL, &wait, err);
        if (status != TD_OK) return status;
    }
    ucx_progress(link);
    return TD_OK;
}

/* --- open and close --- */

typedef struct setting {
    const char *name, *value;
    bool optional; /* not in every UCX version */
} setting;

static td_status apply(ucp_config_t *config, const setting *settings, int n, td_error *err)
{
    for (int i = 0; i < n; i++) {
        ucs_status_t status =
            settings[i].value ? ucp_config_modify(config, settings[i].name, settings[i].value) : UCS_OK;
        if (status != UCS_OK && !settings[i].optional)
            return td_fail(err, TD_EUNSUPPORTED, "UCX setting %s=%s: %s", settings[i].name, settings[i].value,
                           ucs_status_string(status));
    }
    return TD_OK;
}

/* Set here, not left to the environment: a variable in one rank's shell must not give the ranks different transports.
 */
static td_status configure(const td_link_options *o, ucp_config_t *config, td_error *err)
{
    /* Shared memory without UCX's posix transport: a rank that is killed leaves its files in /dev/shm behind, and one
     * that dies while the other maps its file takes that one along (SIGBUS). System V segments vanish with their last
     * user. */
    const char *tls = strcmp(o->transport, "shm") == 0   ? "sysv,cma,self"
                      : strcmp(o->transport, "tcp") == 0 ? "tcp,self"
                      : strcmp(o->transport, "rc") == 0  ? "rc,ud,self"
                                                         : "^posix";
    const setting settings[] = {
        { "TLS", tls, false },
        { "NET_DEVICES", o->net_devices, false },
        { "MEMTYPE_CACHE", "n", true }, /* all memory is host memory */
        { "WARN_UNUSED_ENV_VARS", "n", true },
        { "KEEPALIVE_INTERVAL", "2s", true },
        { "RNDV_THRESH", strcmp(o->transport, "rc") == 0 ? NULL : RNDV_THRESH, false },
        { "MAX_RNDV_RAILS", "2", true },
        { "MAX_EAGER_RAILS", "1", true },
    };
    return apply(config, settings, (int)(sizeof settings / sizeof settings[0]), err);
}

static td_status create_worker(td_link *link, const td_link_options *o, td_error *err)
{
    ucx *u = link->state;
    ucp_config_t *config = NULL;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return td_fail(err, TD_EIO, "UCX configuration: %s", ucs_status_string(status));
    td_status configured = configure(o, config, err);
    ucp_params_t params = { .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
                            .features = UCP_FEATURE_TAG,
                            .estimated_num_eps = 1 };
    if (configured == TD_OK) status = ucp_init(&params, config, &u->context);
    ucp_config_release(config);
    if (configured != TD_OK) return configured;
    if (status != UCS_OK)
        return td_fail(err, TD_EIO, "UCX cannot start with transport %s%s%s: %s", o->transport,
                       o->net_devices ? " on " : "", o->net_devices ? o->net_devices : "", ucs_status_string(status));

    ucp_worker_params_t worker = { .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                   .thread_mode = UCS_THREAD_MODE_SERIALIZED };
    status = ucp_worker_create(u->context, &worker, &u->worker);
    if (status != UCS_OK) return td_fail(err, TD_EIO, "UCX worker: %s", ucs_status_string(status));

    /* Before weights are loaded: registration of a large region has failed on machines whose memory was nearly taken.
     */
    ucp_mem_map_params_t map = { .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                 .address = link->region,
                                 .length = link->region_bytes };
    status = ucp_mem_map(u->context, &map, &u->memory);
    if (status != UCS_OK)
        return td_fail(err, TD_ENOMEM, "UCX cannot register %zu bytes: %s", link->region_bytes,
                       ucs_status_string(status));
    return TD_OK;
}

/* Do both ranks run under one kernel? Then the control connection reports the end of the other process at once, and UCX
 * need not: its shared memory transports (1.13) exist only without its own failure handling. */
static uint64_t machine_id(void)
{
    char text[64] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    size_t n = file ? fread(text, 1, sizeof text, file) : 0;
    if (file) fclose(file);
    return n > 0 ? td_fnv1a(TD_FNV1A_START, text, n) : 0;
}

/* This rank's word to the other: machine id, then the worker's address. */
static td_status swap_addresses(td_link *link, uint8_t *theirs, size_t *theirs_bytes, td_error *err)
{
    ucx *u = link->state;
    ucp_address_t *address = NULL;
    size_t n_bytes = 0;
    ucs_status_t status = ucp_worker_get_address(u->worker, &address, &n_bytes);
    if (status != UCS_OK) return td_fail(err, TD_EIO, "UCX address: %s", ucs_status_string(status));
    uint8_t *mine = malloc(8 + n_bytes);
    td_status swapped = TD_ENOMEM;
    if (mine) {
        td_put_u64(mine, machine_id());
        memcpy(mine + 8, address, n_bytes);
        swapped = td_control_swap_addresses(link->control, mine, 8 + n_bytes, theirs, TD_FRAME_CONTROL_MAX,
                                            theirs_bytes, ADDRESS_TIMEOUT_MS, err);
    }
    free(mine);
    ucp_worker_release_address(u->worker, address);
    if (swapped == TD_OK && *theirs_bytes <= 8)
        return td_fail(err, TD_EPEER, "rank %d sent no transport address", td_control_peer(link->control));
    return swapped;
}

/* A connection that fails because the other process has just died is a lost peer, not a broken transport: the control
 * connection knows within a moment. */
static td_status unreachable(td_link *link, ucs_status_t why, td_error *err)
{
    enum { CHECKS = 50 };
    for (int i = 0; i < CHECKS; i++) {
        td_status lost = td_control_reason(link->control, err);
        if (lost != TD_OK) return lost;
        td_sleep_ns(10000000);
    }
    return td_fail(err, TD_EIO, "transport %s does not reach rank %d: UCX says %s", link->name,
                   td_control_peer(link->control), ucs_status_string(why));
}

static td_status connect_peer(td_link *link, td_error *err)
{
    ucx *u = link->state;
    size_t theirs_bytes = 0;
    uint8_t *theirs = malloc(TD_FRAME_CONTROL_MAX);
    if (!theirs) return td_fail(err, TD_ENOMEM, "link: out of memory");
    td_status swapped = swap_addresses(link, theirs, &theirs_bytes, err);
    if (swapped == TD_OK) {
        bool one_machine = td_get_u64(theirs) != 0 && td_get_u64(theirs) == machine_id();
        bool shared = one_machine && (strcmp(link->name, "shm") == 0 || strcmp(link->name, "auto") == 0);
        ucp_ep_params_t params = { .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                                 UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                   .address = (const ucp_address_t *)(theirs + 8),
                                   .err_mode = shared ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER,
                                   .err_handler = { .cb = on_broken, .arg = u } };
        ucs_status_t status = ucp_ep_create(u->worker, &params, &u->ep);
        u->endpoint_fails = !shared;
        if (status != UCS_OK) swapped = unreachable(link, status, err);
    }
    free(theirs);
    return swapped;
}

td_status td_ucx_available(td_error *err)
{
    (void)err;
    return TD_OK;
}

td_status td_ucx_open(td_link *link, const td_link_options *options, td_error *err)
{
    ucx *u = calloc(1, sizeof *u);
    if (!u) return td_fail(err, TD_ENOMEM, "link: out of memory");
    link->state = u;
    td_status status = create_worker(link, options, err);
    if (status == TD_OK) status = connect_peer(link, err);
    if (status == TD_OK)
        td_log(TD_LOG_INFO, "link", "UCX %s, transport %s, region %zu KiB", ucp_get_version_string(), link->name,
               link->region_bytes >> 10);
    return status;
}

static void abandon(ucx *u, void *request)
{
    if (!request) return;
    ucp_request_cancel(u->worker, request);
    ucp_request_free(request);
}

static void close_endpoint(td_link *link)
{
    ucx *u = link->state;
    abandon(u, u->recv);
    abandon(u, u->send);
    for (int i = 0; i < TD_LINK_PIECES_MAX; i++) {
        abandon(u, u->piece_recv[i]);
        abandon(u, u->piece_send[i]);
    }
    /* By force: nothing is owed, or the peer is lost; a closing handshake could only wait for it. */
    ucp_request_param_t param = { .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE };
    if (!u->endpoint_fails) param.op_attr_mask = 0;
    void *request = ucp_ep_close_nbx(u->ep, &param);
    int64_t end_ns = td_now_ns() + (int64_t)CLOSE_MS * 1000000;
    if (UCS_PTR_IS_ERR(request)) request = NULL;
    while (look(&request, NULL) == UCS_INPROGRESS && td_now_ns() < end_ns) ucp_worker_progress(u->worker);
    if (request) ucp_request_free(request);
}

static void ucx_close(td_link *link)
{
    ucx *u = link->state;
    if (!u) return;
    /* With the peer gone, requests stay behind that UCX would warn about one by one. */
    if (td_control_health(link->control) != TD_LINK_UP) (void)ucs_global_opts_set_value("LOG_LEVEL", "error");
    if (u->ep) close_endpoint(link);
    if (u->memory) ucp_mem_unmap(u->context, u->memory);
    if (u->worker) ucp_worker_destroy(u->worker);
    if (u->context) ucp_cleanup(u->context);
    free(u);
    link->state = NULL;
}

const td_transport td_transport_ucx = {
    .gather = ucx_gather,
    .exchange_start = ucx_exchange_start,
    .exchange_piece = ucx_exchange_piece,
    .exchange_sent = ucx_exchange_sent,
    .progress = ucx_progress,
    .close = ucx_close,
};
