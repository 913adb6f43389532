add_library(td_test_server STATIC ${CMAKE_CURRENT_LIST_DIR}/fake_engine.c ${CMAKE_CURRENT_LIST_DIR}/http_client.c
                                  ${CMAKE_CURRENT_LIST_DIR}/server_fixture.c)
target_include_directories(td_test_server PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_link_libraries(td_test_server PUBLIC td_server PkgConfig::PKG_cmocka)
td_test(unit_server_api SOURCES server_api_test.c DEPS td_test_server PkgConfig::PKG_jansson LABELS unit)
td_test(unit_server_http SOURCES server_http_test.c DEPS td_test_server LABELS unit)
td_test(unit_server_refusal SOURCES server_refusal_test.c DEPS td_test_server LABELS unit)
