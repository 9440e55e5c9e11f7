package main

import (
	"strings"

	"github.com/mmcloughlin/avo/reg"
)

// kernel is a row of the table: how an op is done for some dtypes.
type kernel struct {
	op     string
	dtypes []string
	shape  shape
	method method
}

// Name is that of its functions, less the level.
func (k kernel) Name() string { return strings.ToLower(k.op) + k.dtypes[0] }

// DTypes lists them.
func (k kernel) DTypes() string { return strings.Join(k.dtypes, ", ") }

// quotient is how a dtype is divided by a number of type Wide.
type quotient struct {
	DType, Wide string
	shape       shape
	method      func(e *emitter, by, acc reg.VecVirtual)
}

// Name is that of its functions, less the level.
func (q quotient) Name() string { return "div" + q.DType }

// kernels is what there is for each op and dtype. Of ops that are others in disguise (avg, those of bool) it has the others.
var kernels = []kernel{
	{"Sum", []string{"F32"}, plain, direct((*emitter).VADDPS)},
	{"Sum", []string{"F64"}, plain, direct((*emitter).VADDPD)},
	{"Sum", []string{"F16"}, float16, direct((*emitter).VADDPS)},
	{"Sum", []string{"BF16"}, bfloat16, direct((*emitter).VADDPS)},
	{"Sum", []string{"I8", "U8"}, plain, direct((*emitter).VPADDB)},
	{"Sum", []string{"I16", "U16"}, plain, direct((*emitter).VPADDW)},
	{"Sum", []string{"I32", "U32"}, plain, direct((*emitter).VPADDD)},
	{"Sum", []string{"I64", "U64"}, plain, direct((*emitter).VPADDQ)},

	{"Prod", []string{"F32"}, plain, direct((*emitter).VMULPS)},
	{"Prod", []string{"F64"}, plain, direct((*emitter).VMULPD)},
	{"Prod", []string{"F16"}, float16, direct((*emitter).VMULPS)},
	{"Prod", []string{"BF16"}, bfloat16, direct((*emitter).VMULPS)},
	{"Prod", []string{"I8", "U8"}, plain, multiply8},
	{"Prod", []string{"I16", "U16"}, plain, direct((*emitter).VPMULLW)},
	{"Prod", []string{"I32", "U32"}, plain, direct((*emitter).VPMULLD)},
	{"Prod", []string{"I64", "U64"}, plain, multiply64},

	{"Min", []string{"F32"}, plain, extreme32((*emitter).VMINPS)},
	{"Min", []string{"F64"}, plain, extreme64((*emitter).VMINPD)},
	{"Min", []string{"F16"}, float16, extreme32((*emitter).VMINPS)},
	{"Min", []string{"BF16"}, bfloat16, extreme32((*emitter).VMINPS)},
	{"Min", []string{"I8"}, plain, direct((*emitter).VPMINSB)},
	{"Min", []string{"I16"}, plain, direct((*emitter).VPMINSW)},
	{"Min", []string{"I32"}, plain, direct((*emitter).VPMINSD)},
	{"Min", []string{"I64"}, plain, least64(direct((*emitter).VPMINSQ))},
	{"Min", []string{"U8"}, plain, direct((*emitter).VPMINUB)},
	{"Min", []string{"U16"}, plain, direct((*emitter).VPMINUW)},
	{"Min", []string{"U32"}, plain, direct((*emitter).VPMINUD)},
	{"Min", []string{"U64"}, biased, least64(direct((*emitter).VPMINUQ))},

	{"Max", []string{"F32"}, plain, extreme32((*emitter).VMAXPS)},
	{"Max", []string{"F64"}, plain, extreme64((*emitter).VMAXPD)},
	{"Max", []string{"F16"}, float16, extreme32((*emitter).VMAXPS)},
	{"Max", []string{"BF16"}, bfloat16, extreme32((*emitter).VMAXPS)},
	{"Max", []string{"I8"}, plain, direct((*emitter).VPMAXSB)},
	{"Max", []string{"I16"}, plain, direct((*emitter).VPMAXSW)},
	{"Max", []string{"I32"}, plain, direct((*emitter).VPMAXSD)},
	{"Max", []string{"I64"}, plain, greatest64(direct((*emitter).VPMAXSQ))},
	{"Max", []string{"U8"}, plain, direct((*emitter).VPMAXUB)},
	{"Max", []string{"U16"}, plain, direct((*emitter).VPMAXUW)},
	{"Max", []string{"U32"}, plain, direct((*emitter).VPMAXUD)},
	{"Max", []string{"U64"}, biased, greatest64(direct((*emitter).VPMAXUQ))},

	{"Band", integers, plain, direct((*emitter).VANDPS)},
	{"Bor", integers, plain, direct((*emitter).VORPS)},
	{"Bxor", integers, plain, direct((*emitter).VXORPS)},
	{"Band", []string{"Bool"}, boolean, direct((*emitter).VANDPS)},
	{"Bor", []string{"Bool"}, boolean, direct((*emitter).VORPS)},
	{"Bxor", []string{"Bool"}, boolean, direct((*emitter).VXORPS)},
}

var integers = []string{"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64"}

var quotients = []quotient{
	{"F32", "float32", plain, func(e *emitter, by, acc reg.VecVirtual) { e.VDIVPS(by, acc, acc) }},
	{"F64", "float64", plain, func(e *emitter, by, acc reg.VecVirtual) { e.VDIVPD(by, acc, acc) }},
	{"F16", "float32", float16, func(e *emitter, by, acc reg.VecVirtual) { e.VDIVPS(by, acc, acc) }},
	{"BF16", "float32", bfloat16, func(e *emitter, by, acc reg.VecVirtual) { e.VDIVPS(by, acc, acc) }},
}
