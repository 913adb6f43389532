# Two real ranks of the bundled demo model: real clients, exactness, faults, start.sh.
find_program(JQ jq)
set(ranks ${CMAKE_CURRENT_SOURCE_DIR}/with_ranks.sh $<TARGET_FILE:tandem>)
if(NODE AND NPM)
    foreach(script openai load)
        add_test(NAME e2e_ranks_${script} COMMAND ${ranks} ${NODE} --test ${e2e_dir}/${script}.test.js
                 WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
        set_tests_properties(e2e_ranks_${script} PROPERTIES FIXTURES_REQUIRED e2e_npm TIMEOUT 600 LABELS e2e RUN_SERIAL ON)
    endforeach()
endif()
if(CURL AND JQ)
    add_test(NAME e2e_ranks_curl COMMAND ${ranks} ${CMAKE_CURRENT_SOURCE_DIR}/curl.sh WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    add_test(NAME e2e_exact COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/exact.sh $<TARGET_FILE:tandem> WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    add_test(NAME e2e_rank_faults COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/rank_faults.sh $<TARGET_FILE:tandem>
             WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    add_test(NAME e2e_rank_signals COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/rank_signals.sh $<TARGET_FILE:tandem>
             WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    add_test(NAME e2e_rank_faults_slow COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/rank_faults.sh $<TARGET_FILE:tandem> 10
             WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    add_test(NAME e2e_start COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/start_test.sh ${CMAKE_BINARY_DIR} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(e2e_ranks_curl e2e_exact e2e_rank_faults e2e_rank_signals e2e_start PROPERTIES TIMEOUT 600 LABELS e2e RUN_SERIAL ON)
    set_tests_properties(e2e_rank_faults_slow PROPERTIES TIMEOUT 600 LABELS "e2e;slow" RUN_SERIAL ON)
endif()
