#include "textflag.h"

// func cpuid(leaf, subleaf uint32) (eax, ebx, ecx, edx uint32)
TEXT ·cpuid(SB), NOSPLIT, $0-24
	MOVL leaf+0(FP), AX
	MOVL subleaf+4(FP), CX
	CPUID
	MOVL AX, eax+8(FP)
	MOVL BX, ebx+12(FP)
	MOVL CX, ecx+16(FP)
	MOVL DX, edx+20(FP)
	RET

// func storeFence()
TEXT ·storeFence(SB), NOSPLIT, $0-0
	SFENCE
	RET

// func fullFence()
TEXT ·fullFence(SB), NOSPLIT, $0-0
	MFENCE
	RET

// The three loops below take the address of the first line and a count of 64-byte lines, at least one.

// func linesCLWB(p unsafe.Pointer, n uintptr)
TEXT ·linesCLWB(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
loop:
	CLWB (SI)
	ADDQ $64, SI
	DECQ CX
	JNZ  loop
	RET

// func linesCLFLUSHOPT(p unsafe.Pointer, n uintptr)
TEXT ·linesCLFLUSHOPT(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
loop:
	CLFLUSHOPT (SI)
	ADDQ $64, SI
	DECQ CX
	JNZ  loop
	RET

// func linesCLFLUSH(p unsafe.Pointer, n uintptr)
TEXT ·linesCLFLUSH(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
loop:
	CLFLUSH (SI)
	ADDQ $64, SI
	DECQ CX
	JNZ  loop
	RET

// The two copies below take a destination aligned to 64 and a length that is a multiple of 256, at least 256. They
// store past the caches and end with SFENCE, so that later stores cannot be seen before the copied bytes.

// func copyAVX2(dst, src unsafe.Pointer, n uintptr)
TEXT ·copyAVX2(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
loop:
	PREFETCHNTA 512(SI)
	PREFETCHNTA 576(SI)
	PREFETCHNTA 640(SI)
	PREFETCHNTA 704(SI)
	VMOVDQU  0(SI), Y0
	VMOVDQU  32(SI), Y1
	VMOVDQU  64(SI), Y2
	VMOVDQU  96(SI), Y3
	VMOVDQU  128(SI), Y4
	VMOVDQU  160(SI), Y5
	VMOVDQU  192(SI), Y6
	VMOVDQU  224(SI), Y7
	VMOVNTDQ Y0, 0(DI)
	VMOVNTDQ Y1, 32(DI)
	VMOVNTDQ Y2, 64(DI)
	VMOVNTDQ Y3, 96(DI)
	VMOVNTDQ Y4, 128(DI)
	VMOVNTDQ Y5, 160(DI)
	VMOVNTDQ Y6, 192(DI)
	VMOVNTDQ Y7, 224(DI)
	ADDQ $256, SI
	ADDQ $256, DI
	SUBQ $256, CX
	JNZ  loop
	SFENCE
	VZEROUPPER
	RET

// func copyAVX512(dst, src unsafe.Pointer, n uintptr)
TEXT ·copyAVX512(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
loop:
	PREFETCHNTA 512(SI)
	PREFETCHNTA 576(SI)
	PREFETCHNTA 640(SI)
	PREFETCHNTA 704(SI)
	VMOVDQU64 0(SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VMOVNTDQ  Z0, 0(DI)
	VMOVNTDQ  Z1, 64(DI)
	VMOVNTDQ  Z2, 128(DI)
	VMOVNTDQ  Z3, 192(DI)
	ADDQ $256, SI
	ADDQ $256, DI
	SUBQ $256, CX
	JNZ  loop
	SFENCE
	VZEROUPPER
	RET
