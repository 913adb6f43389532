/* Error feedback for the quantizer (LDLQ): the errors already made in rows below steer the rows above. */
#ifndef TD_CHECKPOINT_EXL3_FEEDBACK_H
#define TD_CHECKPOINT_EXL3_FEEDBACK_H

#include "base/status.h"

TD_BEGIN_C

/* From the input Hessian H = sum of x x^T (any positive factor) of the plain weight to the feedback matrix of the
 * regularised one. With R = Hn diag(suh) (H / mean(diag H) + 0.025 I) diag(suh) Hn = C C^T (Cholesky, C lower):
 *
 *   feedback = C * blockdiag(C_ii)^-1 - I      16 x 16 blocks: strictly block lower triangular, [k][k] row-major
 *
 * k: a multiple of 128; hessian [k][k], symmetric (the lower half is read); suh [k]: the scales that will be stored.
 * *used = false and feedback untouched when H says nothing (its mean diagonal below 1e-20 or not finite) or stays
 * indefinite after ten times more weight on its diagonal. Single-threaded, k^3 / 3 steps in double. */
td_status td_exl3_feedback(int k, const float *hessian, const float *suh, float *feedback, bool *used, td_error *err);

TD_END_C
#endif
