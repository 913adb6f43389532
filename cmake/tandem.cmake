# Helpers for the folders' CMakeLists.txt: one static library a folder, one program a test.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)

# td_library(NAME SOURCES a.c b.c [DEPS td_base ...] [PKGS libcurl ...]): libNAME.a; PKGS are pkg-config modules.
function(td_library name)
    cmake_parse_arguments(A "" "" "SOURCES;DEPS;PKGS" ${ARGN})
    add_library(${name} STATIC ${A_SOURCES})
    target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${name} PUBLIC ${A_DEPS} Threads::Threads m)
    foreach(pkg ${A_PKGS})
        string(MAKE_C_IDENTIFIER "PKG_${pkg}" var)
        pkg_check_modules(${var} REQUIRED IMPORTED_TARGET GLOBAL ${pkg})
        target_link_libraries(${name} PUBLIC PkgConfig::${var})
    endforeach()
endfunction()

# td_test(NAME SOURCES x.c [DEPS ...] [ARGS ...] [LABELS ...] [TIMEOUT s]): a cmocka program, run by CTest from the source root.
# Label arm64: also in the cross build, which has nothing else. It runs under qemu, some 20 times slower: not for all.
function(td_test name)
    cmake_parse_arguments(A "" "TIMEOUT" "SOURCES;DEPS;ARGS;LABELS" ${ARGN})
    add_executable(${name} ${A_SOURCES})
    target_link_libraries(${name} PRIVATE ${A_DEPS} PkgConfig::PKG_cmocka PkgConfig::PKG_jansson)
    if(CMAKE_CROSSCOMPILING AND NOT "arm64" IN_LIST A_LABELS)
        set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
        return()
    endif()
    add_test(NAME ${name} COMMAND ${name} ${A_ARGS} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    if(NOT A_TIMEOUT)
        set(A_TIMEOUT 120)
        if(CMAKE_CROSSCOMPILING OR TD_SANITIZE)
            set(A_TIMEOUT 600)
        endif()
    endif()
    set_tests_properties(${name} PROPERTIES TIMEOUT ${A_TIMEOUT} LABELS "${A_LABELS}")
endfunction()

# td_fuzz(NAME SOURCES x.c [DEPS ...] CORPUS dir): with TD_FUZZ a libFuzzer program; always a ctest that replays the corpus.
function(td_fuzz name)
    cmake_parse_arguments(A "" "CORPUS" "SOURCES;DEPS" ${ARGN})
    if(TD_FUZZ)
        add_executable(${name} ${A_SOURCES})
        target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    else()
        add_executable(${name} ${A_SOURCES} ${PROJECT_SOURCE_DIR}/tests/fuzz/replay.c)
        add_test(NAME ${name} COMMAND ${name} ${A_CORPUS} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}/tests/fuzz)
        set_tests_properties(${name} PROPERTIES TIMEOUT 120 LABELS fuzz)
    endif()
    target_link_libraries(${name} PRIVATE ${A_DEPS})
endfunction()

# Of the tests alone. jansson: what tests write and read JSON with, so that our own reader is not its own judge.
pkg_check_modules(PKG_cmocka IMPORTED_TARGET GLOBAL cmocka)
pkg_check_modules(PKG_jansson IMPORTED_TARGET GLOBAL jansson)
