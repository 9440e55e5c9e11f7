package reduce

// level is a set of vector instructions.
type level uint8

const (
	plainGo level = iota
	avx2
	avx512
)

// String gives the level's name.
func (l level) String() string { return [...]string{"Go", "AVX2", "AVX-512"}[l] }

// current is the level that is used: the highest that the CPU has. Tests set it.
var current = best()

// stretch is the most bytes of a result that one call of a kernel makes: Go cannot stop a goroutine in it, and whoever wants to
// stop the world waits for it.
const stretch = 256 << 10
