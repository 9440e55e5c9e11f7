package reduce

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDTypesAreNamedAsTorchNamesThem(t *testing.T) {
	for name, want := range map[string]struct {
		dt   DType
		size int
	}{
		"float32": {F32, 4}, "float64": {F64, 8}, "float16": {F16, 2}, "bfloat16": {BF16, 2},
		"int8": {I8, 1}, "int16": {I16, 2}, "int32": {I32, 4}, "int64": {I64, 8},
		"uint8": {U8, 1}, "uint16": {U16, 2}, "uint32": {U32, 4}, "uint64": {U64, 8}, "bool": {Bool, 1},
		"float8_e4m3fn": {F8E4M3FN, 1}, "float8_e5m2": {F8E5M2, 1}, "float8_e4m3fnuz": {F8E4M3FNUZ, 1},
		"float8_e5m2fnuz": {F8E5M2FNUZ, 1}, "float8_e8m0fnu": {F8E8M0, 1},
	} {
		dt, err := ParseDType("torch." + name)
		require.NoError(t, err)
		require.Equal(t, want.dt, dt)
		require.Equal(t, name, dt.String())
		require.Equal(t, want.size, dt.Size())
	}
	dt, err := ParseDType("half")
	require.NoError(t, err)
	require.Equal(t, F16, dt)

	_, err = ParseDType("complex64")
	var unknown *UnknownError
	require.ErrorAs(t, err, &unknown)
	require.Contains(t, err.Error(), `no dtype is named "complex64": it is one of float32, float64`)
	require.False(t, DType(0).Valid())
	require.Zero(t, DType(200).Size())
	require.Equal(t, "DType(200)", DType(200).String())
}

func TestOpsHaveNames(t *testing.T) {
	for op, name := range []string{"sum", "prod", "min", "max", "avg", "band", "bor", "bxor"} {
		require.Equal(t, name, Op(op).String())
		parsed, err := ParseOp(name)
		require.NoError(t, err)
		require.Equal(t, Op(op), parsed)
	}
	op, err := ParseOp("BAND")
	require.NoError(t, err)
	require.Equal(t, Band, op)
	_, err = ParseOp("premul_sum")
	require.EqualError(t, err, `reduce: no op is named "premul_sum": it is one of sum, prod, min, max, avg, band, bor, bxor`)
	require.Equal(t, "Op(8)", Op(8).String())
}

// TestCheck lists which dtype has which op.
func TestCheck(t *testing.T) {
	const arithmetic, bitwise, none = "sum prod min max avg ", "band bor bxor ", ""
	for dt, want := range map[DType]string{
		F32: arithmetic, F64: arithmetic, F16: arithmetic, BF16: arithmetic,
		I8: arithmetic + bitwise, I16: arithmetic + bitwise, I32: arithmetic + bitwise, I64: arithmetic + bitwise,
		U8: arithmetic + bitwise, U16: arithmetic + bitwise, U32: arithmetic + bitwise, U64: arithmetic + bitwise,
		Bool:     "sum prod min max " + bitwise,
		F8E4M3FN: none, F8E5M2: none, F8E4M3FNUZ: none, F8E5M2FNUZ: none, F8E8M0: none,
		0: none, F8E8M0 + 1: none,
	} {
		got := ""
		for op := Sum; op.Valid(); op++ {
			err := Check(op, dt)
			if err == nil {
				got += op.String() + " "
				continue
			}
			var unsupported *UnsupportedError
			require.ErrorAs(t, err, &unsupported)
			require.Equal(t, UnsupportedError{op, dt}, *unsupported)
		}
		require.Equal(t, want, got, "%v", dt)
		require.Error(t, Check(Bxor+1, dt))
	}
}

func TestARefusalSaysWhatToDo(t *testing.T) {
	for want, err := range map[string]error{
		"reduce: float32 does not have bor: bitwise ops are for integers and bool":                                        Check(Bor, F32),
		"reduce: bool does not have avg: use max for any and min for all, or convert to an integer to count":              Check(Avg, Bool),
		"reduce: float8_e5m2 does not have sum: eight-bit floats can be moved but not reduced: convert to bfloat16 first": Check(Sum, F8E5M2),
		"reduce: DType(0) does not have sum: use a dtype that DType's constants name":                                     Check(Sum, 0),
		"reduce: int8 does not have Op(77): use one that Op's constants name":                                             Check(77, I8),
	} {
		require.EqualError(t, err, want)
	}
}
