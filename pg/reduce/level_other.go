//go:build !amd64

package reduce

func best() level { return plainGo }

func foldLines(Op, DType, []byte, [][]byte) (first, end int) { return 0, 0 }

func divideLines(DType, []byte, int) (first, end int) { return 0, 0 }
