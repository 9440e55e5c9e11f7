package pgbench

import (
	"fmt"
	"strconv"
)

// Heading stands above rows that are printed.
const Heading = `#                                                      out-of-place                              in-place
#       size         count      type   redop    root       time     p50   algbw   busbw  #wrong       time     p50   algbw   busbw  #wrong
#        (B)    (elements)                                 (us)    (us)  (GB/s)  (GB/s)                (us)    (us)  (GB/s)  (GB/s)
`

// String is a line of the table.
func (r Row) String() string {
	return fmt.Sprintf("%12d  %12d  %8s  %6s  %6d  %s  %s\n", r.Size, r.Count, r.Type, r.Op, r.Root, r.Out, r.In)
}

// String is the part of a line.
func (p Point) String() string {
	wrong := "N/A"
	if p.Wrong >= 0 {
		wrong = strconv.Itoa(p.Wrong)
	}
	return fmt.Sprintf("%9.2f %7.1f  %6.2f  %6.2f  %6s", p.Micros, p.P50, p.AlgBW, p.BusBW, wrong)
}
