// Package reduce combines arrays of numbers element by element, as collectives do: sums, products, extremes and bitwise
// operations of any number of operands, for torch's dtypes.
//
// # The same bits everywhere
//
// Ranks on different CPUs take part in one reduction, so the result is defined to the bit, and every implementation here gives
// the same: AVX-512, AVX2, and plain Go, which is also what takes the last bytes that fill no vector.
//
//   - Operands are combined from the left, in the order in which they are given.
//   - float16 and bfloat16 are widened to float32, combined there over all operands, and rounded once, to nearest even.
//   - A NaN among the operands of a sum, product or quotient is the result, quieted, the accumulated one before the next; a NaN
//     that comes of others (Inf-Inf, 0*Inf) is the one that x86 makes, whose sign bit is set. Its sign and payload are kept when
//     float16 and bfloat16 are rounded.
//   - Min and Max give one of their operands as it is: a NaN, the accumulated one before the next, as torch.minimum and torch.maximum
//     do; of equal ones, which differ only as zeros of either sign, the next. A signalling NaN stays one but in float16,
//     where widening quiets it.
//   - Integers wrap around. A byte of bool that is not zero is true, and results are 0 or 1.
//
// This holds in threads whose floating-point control word is the usual one: who has a thread flush denormal numbers to zero, as
// torch.set_flush_denormal does, has float32 and float64 flushed here, too.
//
// # Average
//
// [Reduce] with [Avg] sums; [Divide] ends it when the operands of all ranks are in. So a float16 sum may overflow although the
// average would not, as in torch's own process groups on CPUs. Integers are truncated towards zero, as
// torch's div_ does with rounding_mode="trunc".
package reduce
