td_test(link_pair SOURCES link_pair_test.c link_harness.c DEPS td_link td_base LABELS faults TIMEOUT 120)
