package reduce

import (
	"fmt"
	"strings"
)

// DType is the type of an array's elements. The numbers are the same in all versions: peers compare them.
type DType uint8

// The dtypes, named as torch names them. The zero value is none, so that a missing one is noticed. Those of eight-bit floats can
// be moved, but not reduced.
const (
	F32 DType = iota + 1
	F64
	F16
	BF16
	I8
	I16
	I32
	I64
	U8
	U16
	U32
	U64
	Bool
	F8E4M3FN
	F8E5M2
	F8E4M3FNUZ
	F8E5M2FNUZ
	F8E8M0
)

// family is how the elements of a dtype are combined.
type family uint8

const (
	opaque family = iota
	floats
	integers
	booleans
)

// dtypes says what there is to know about each dtype.
var dtypes = [...]struct {
	name   string
	size   int
	family family
}{
	F32:        {"float32", 4, floats},
	F64:        {"float64", 8, floats},
	F16:        {"float16", 2, floats},
	BF16:       {"bfloat16", 2, floats},
	I8:         {"int8", 1, integers},
	I16:        {"int16", 2, integers},
	I32:        {"int32", 4, integers},
	I64:        {"int64", 8, integers},
	U8:         {"uint8", 1, integers},
	U16:        {"uint16", 2, integers},
	U32:        {"uint32", 4, integers},
	U64:        {"uint64", 8, integers},
	Bool:       {"bool", 1, booleans},
	F8E4M3FN:   {"float8_e4m3fn", 1, opaque},
	F8E5M2:     {"float8_e5m2", 1, opaque},
	F8E4M3FNUZ: {"float8_e4m3fnuz", 1, opaque},
	F8E5M2FNUZ: {"float8_e5m2fnuz", 1, opaque},
	F8E8M0:     {"float8_e8m0fnu", 1, opaque},
}

// aliases are torch's other names of some dtypes.
var aliases = map[string]DType{"half": F16, "float": F32, "double": F64, "short": I16, "int": I32, "long": I64}

// Valid reports whether dt is one of the dtypes.
func (dt DType) Valid() bool { return dt > 0 && int(dt) < len(dtypes) }

// Size is an element's size in bytes, 0 if dt is not valid.
func (dt DType) Size() int {
	if !dt.Valid() {
		return 0
	}
	return dtypes[dt].size
}

// String gives torch's name of the dtype.
func (dt DType) String() string {
	if !dt.Valid() {
		return fmt.Sprintf("DType(%d)", uint8(dt))
	}
	return dtypes[dt].name
}

// ParseDType finds a dtype by torch's name of it, such as "bfloat16", or "torch.bfloat16", which is how Python prints it. Torch's
// other names ("half") will do. The error is an *[UnknownError].
func ParseDType(name string) (DType, error) {
	short := strings.TrimPrefix(name, "torch.")
	known := make([]string, 0, len(dtypes))
	for dt := F32; dt.Valid(); dt++ {
		if dtypes[dt].name == short {
			return dt, nil
		}
		known = append(known, dtypes[dt].name)
	}
	if dt, ok := aliases[short]; ok {
		return dt, nil
	}
	return 0, &UnknownError{Kind: "dtype", Name: name, Known: known}
}

// Op is how elements are combined. The numbers are the same in all versions: peers compare them.
type Op uint8

// The ops. Avg is Sum followed by [Divide].
const (
	Sum Op = iota
	Prod
	Min
	Max
	Avg
	Band
	Bor
	Bxor
)

// ops are the names of the ops.
var ops = [...]string{Sum: "sum", Prod: "prod", Min: "min", Max: "max", Avg: "avg", Band: "band", Bor: "bor", Bxor: "bxor"}

// Valid reports whether op is one of the ops.
func (op Op) Valid() bool { return int(op) < len(ops) }

// String gives the op's name: torch's in lower case.
func (op Op) String() string {
	if !op.Valid() {
		return fmt.Sprintf("Op(%d)", uint8(op))
	}
	return ops[op]
}

// ParseOp finds an op by its name, in capitals or not. The error is an *[UnknownError].
func ParseOp(name string) (Op, error) {
	for op, known := range ops {
		if known == strings.ToLower(name) {
			return Op(op), nil
		}
	}
	return 0, &UnknownError{Kind: "op", Name: name, Known: ops[:]}
}

// UnknownError says that nothing has the name.
type UnknownError struct {
	Kind  string // "dtype" or "op"
	Name  string
	Known []string
}

// Error implements error.
func (e *UnknownError) Error() string {
	return fmt.Sprintf("reduce: no %s is named %q: it is one of %s", e.Kind, e.Name, strings.Join(e.Known, ", "))
}

// UnsupportedError says that a dtype does not have an op.
type UnsupportedError struct {
	Op    Op
	DType DType
}

// Error implements error.
func (e *UnsupportedError) Error() string {
	help := "use one that Op's constants name"
	switch {
	case !e.DType.Valid():
		help = "use a dtype that DType's constants name"
	case e.Op.Valid() && dtypes[e.DType].family == opaque:
		help = "eight-bit floats can be moved but not reduced: convert to bfloat16 first"
	case e.Op.Valid() && dtypes[e.DType].family == booleans:
		help = "use max for any and min for all, or convert to an integer to count"
	case e.Op.Valid():
		help = "bitwise ops are for integers and bool"
	}
	return fmt.Sprintf("reduce: %v does not have %v: %s", e.DType, e.Op, help)
}

// Check says whether the dtype has the op: floats and integers have sum, prod, min, max and avg, integers and bool the
// bitwise ones. Of bool, sum and max are "any", prod and min are "all"; it has no average. The error is an *[UnsupportedError].
func Check(op Op, dt DType) error {
	ok := false
	if op.Valid() && dt.Valid() {
		bitwise := op == Band || op == Bor || op == Bxor
		switch dtypes[dt].family {
		case floats:
			ok = !bitwise
		case integers:
			ok = true
		case booleans:
			ok = op != Avg
		case opaque:
		}
	}
	if !ok {
		return &UnsupportedError{Op: op, DType: dt}
	}
	return nil
}
