td_fuzz(fuzz_http SOURCES http_fuzz.c DEPS td_test_server CORPUS corpus/http)
td_fuzz(fuzz_route SOURCES route_fuzz.c DEPS td_test_server CORPUS corpus/route)
