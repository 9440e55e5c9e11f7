#include "textflag.h"

DATA prime32<>+0(SB)/8, $0x9E3779B1
GLOBL prime32<>(SB), RODATA|NOPTR, $8

// One stripe of 64 bytes: STORE copies it from SI to DI, and the accumulators Y0 and Y1 take it in with the secret at R8.
#define STRIPE(STORE) \
	PREFETCHNTA 1024(SI)         \
	VMOVDQU     0(SI), Y2        \
	VMOVDQU     32(SI), Y3       \
	STORE       Y2, 0(DI)        \
	STORE       Y3, 32(DI)       \
	VPXOR       0(R8), Y2, Y4    \
	VPXOR       32(R8), Y3, Y5   \
	VPSRLQ      $32, Y4, Y6      \
	VPSRLQ      $32, Y5, Y7      \
	VPMULUDQ    Y4, Y6, Y6       \
	VPMULUDQ    Y5, Y7, Y7       \
	VPSHUFD     $0x4E, Y2, Y2    \
	VPSHUFD     $0x4E, Y3, Y3    \
	VPADDQ      Y2, Y0, Y0       \
	VPADDQ      Y3, Y1, Y1       \
	VPADDQ      Y6, Y0, Y0       \
	VPADDQ      Y7, Y1, Y1       \
	ADDQ        $64, SI          \
	ADDQ        $64, DI          \
	ADDQ        $8, R8

// The end of a block: ACC ^= ACC>>47, ^= secret, *= prime32 (in Y8).
#define SCRAMBLE(ACC, AT) \
	VPSRLQ   $47, ACC, Y4    \
	VPXOR    Y4, ACC, ACC    \
	VPXOR    AT(DX), ACC, ACC \
	VPSRLQ   $32, ACC, Y4    \
	VPMULUDQ Y8, ACC, ACC    \
	VPMULUDQ Y8, Y4, Y4      \
	VPSLLQ   $32, Y4, Y4     \
	VPADDQ   Y4, ACC, ACC

// func sumCopyAVX2(acc *[8]uint64, dst, src unsafe.Pointer, blocks uintptr, secret *[192]byte, stream bool)
//
// It copies blocks of 1024 bytes, at least one, past the caches if stream is set (dst is aligned to 64 then).
TEXT ·sumCopyAVX2(SB), NOSPLIT, $0-41
	MOVQ         acc+0(FP), R9
	MOVQ         dst+8(FP), DI
	MOVQ         src+16(FP), SI
	MOVQ         blocks+24(FP), CX
	MOVQ         secret+32(FP), DX
	MOVBLZX      stream+40(FP), R10
	VMOVDQU      0(R9), Y0
	VMOVDQU      32(R9), Y1
	VPBROADCASTQ prime32<>(SB), Y8

block:
	MOVQ  DX, R8
	MOVQ  $8, R11
	TESTL R10, R10
	JZ    cached

streamed:
	STRIPE(VMOVNTDQ)
	STRIPE(VMOVNTDQ)
	DECQ R11
	JNZ  streamed
	JMP  scramble

cached:
	STRIPE(VMOVDQU)
	STRIPE(VMOVDQU)
	DECQ R11
	JNZ  cached

scramble:
	SCRAMBLE(Y0, 128)
	SCRAMBLE(Y1, 160)
	DECQ CX
	JNZ  block

	VMOVDQU Y0, 0(R9)
	VMOVDQU Y1, 32(R9)
	VZEROUPPER
	RET
