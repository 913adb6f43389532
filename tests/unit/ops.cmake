foreach(area math linear hyper kda dsa moe)
    td_test(unit_ops_${area} SOURCES ops_${area}_test.c ops_support.c DEPS td_ops LABELS unit ops)
endforeach()
