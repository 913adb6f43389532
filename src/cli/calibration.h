/* Hessians of the routed experts from a text: what `tandem quantize --calibration` hands to td_exl3_convert
 * (docs/exl3.md "Calibration").
 *
 *     td_calibration_create(&options, &c, err)            reads and tokenises the text; takes no other resource
 *     args.hessian = td_calibration_source(c)             the first question runs the model over the text
 *     td_exl3_convert(&args, &result, err)
 *     td_calibration_destroy(c)
 *
 * Lazy, because td_exl3_convert refuses what cannot be converted before it asks the first question. */
#ifndef TD_CLI_CALIBRATION_H
#define TD_CLI_CALIBRATION_H

#include "checkpoint/exl3_convert.h"

TD_BEGIN_C

enum { TD_CALIBRATION_WINDOW = 2048 }; /* tokens that see each other */

typedef struct td_calibration td_calibration;

typedef struct td_calibration_options {
    const char *checkpoint_dir; /* plain weights, with tokenizer.json */
    const char *text_path;      /* UTF-8; special tokens written out are recognised */
    const char *scratch_path;   /* the inputs of the experts go into a nameless file beside this */
    int64_t tokens_max;         /* of the text, from its start */
    int n_threads;              /* decides nothing but time */
    void (*progress)(void *user, int64_t n_done, int64_t n_total); /* tokens, after each piece; NULL: none */
    void *progress_user;
} td_calibration_options;

/* The options' strings are borrowed until destroy. TD_EIO, TD_EFORMAT, ...: the text, the tokenizer, the checkpoint. */
td_status td_calibration_create(const td_calibration_options *options, td_calibration **out, td_error *err);
void td_calibration_destroy(td_calibration *calibration); /* NULL is allowed */

int64_t td_calibration_n_tokens(const td_calibration *calibration);

/* Valid until destroy. *known = false for a matrix whose expert saw fewer rows than the matrix has inputs. */
const td_hessian_source *td_calibration_source(const td_calibration *calibration);

TD_END_C
#endif
