#include "textflag.h"

// func cacheType() uint64
TEXT ·cacheType(SB), NOSPLIT, $0-8
	MRS  CTR_EL0, R0
	MOVD R0, ret+0(FP)
	RET

// func storeFence()
TEXT ·storeFence(SB), NOSPLIT, $0-0
	DSB $14 // SY, stores
	RET

// func fullFence()
TEXT ·fullFence(SB), NOSPLIT, $0-0
	DSB $15 // SY
	RET

// The two loops below take the address of the first line, a count of lines of at least one, and the line size.

// func linesCVAC(p unsafe.Pointer, n, line uintptr)
TEXT ·linesCVAC(SB), NOSPLIT, $0-24
	MOVD p+0(FP), R0
	MOVD n+8(FP), R1
	MOVD line+16(FP), R2
loop:
	DC   CVAC, R0
	ADD  R2, R0
	SUBS $1, R1
	BNE  loop
	RET

// func linesCIVAC(p unsafe.Pointer, n, line uintptr)
TEXT ·linesCIVAC(SB), NOSPLIT, $0-24
	MOVD p+0(FP), R0
	MOVD n+8(FP), R1
	MOVD line+16(FP), R2
loop:
	DC   CIVAC, R0
	ADD  R2, R0
	SUBS $1, R1
	BNE  loop
	RET
