/* The table of routes. A path is looked up without its query string (libmicrohttpd cuts it off), without one trailing
 * slash, and without a leading /v1 where the route has both forms. */
#include "server/core.h"

#include <stdio.h>
#include <string.h>

enum { FOR_TOKENS = TD_ROUTE_KEY | TD_ROUTE_READY };

static const td_route routes[] = {
    { "/chat/completions", "/v1/chat/completions", TD_METHOD_POST, FOR_TOKENS, td_route_chat },
    { "/completions", "/v1/completions", TD_METHOD_POST, FOR_TOKENS, td_route_completions },
    { "/tokenize", "/tokenize", TD_METHOD_POST, FOR_TOKENS, td_route_tokenize },
    { "/detokenize", "/detokenize", TD_METHOD_POST, FOR_TOKENS, td_route_detokenize },
    { "/models", "/v1/models", TD_METHOD_GET, FOR_TOKENS, td_route_models },
    { "/models/", "/v1/models/{id}", TD_METHOD_GET, FOR_TOKENS | TD_ROUTE_PREFIX, td_route_model },
    { "/health", "/health", TD_METHOD_GET, TD_ROUTE_PROBE, td_route_health },
    { "/metrics", "/metrics", TD_METHOD_GET, TD_ROUTE_KEY | TD_ROUTE_METRICS | TD_ROUTE_PROBE, td_route_metrics },
    { "/ping", "/ping", TD_METHOD_GET, TD_ROUTE_PROBE, td_route_ping },
    { "/version", "/version", TD_METHOD_GET, 0, td_route_version },
};

static const td_route not_found = { "", "-", 0, 0, NULL };

static bool matches(const td_route *route, const char *path, size_t n_bytes)
{
    size_t n_route = strlen(route->path);
    if (route->flags & TD_ROUTE_PREFIX) return n_bytes > n_route && memcmp(path, route->path, n_route) == 0;
    return n_bytes == n_route && memcmp(path, route->path, n_route) == 0;
}

const td_route *td_route_find(const char *path, const char **path_arg)
{
    if (strncmp(path, "/v1/", 4) == 0) path += 3;
    size_t n_bytes = strlen(path);
    if (n_bytes > 1 && path[n_bytes - 1] == '/') n_bytes--;
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        if (!matches(&routes[i], path, n_bytes)) continue;
        *path_arg = path + strlen(routes[i].path);
        return &routes[i];
    }
    *path_arg = "";
    return &not_found;
}

void td_route_allow(const td_route *route, char allow[64])
{
    snprintf(allow, 64, "%s, OPTIONS", route->methods & TD_METHOD_GET ? "GET, HEAD" : "POST");
}
