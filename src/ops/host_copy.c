/* See host_copy.h. Faulting pages in one after the other, the kernel reads 128 KiB ahead, which is too little for a fast
 * disk: so the whole range is asked for first. Not more than that: a loader gives pages back as it goes, and what was
 * read too early would be read twice. One thread: out of the page cache it copies 5 to 7 GB/s (2 cores of an EPYC, busy),
 * which two threads did not better. `to` should begin at a page: a copy to 16 bytes behind one was five times slower. */
#include "ops/host_copy.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void td_host_copy_rows(void *to, const void *from, size_t from_stride, size_t row_bytes, size_t n_rows)
{
    if (!n_rows) return;
    size_t before = (size_t)((uintptr_t)from % (uintptr_t)sysconf(_SC_PAGESIZE));
    size_t range = before + (n_rows - 1) * from_stride + row_bytes;
    (void)madvise((void *)((uintptr_t)from - before), range,
                  MADV_WILLNEED); /* advice: memory that is no file ignores it */
    for (size_t r = 0; r < n_rows; r++)
        memcpy((unsigned char *)to + r * row_bytes, (const unsigned char *)from + r * from_stride, row_bytes);
}
