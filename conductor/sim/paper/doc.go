// Package paper runs the experiments of the papers on the simulator, and sets what comes out beside what they measured.
//
// The papers are the arXiv report (2407.00079) and the one of FAST'25 on the same system. Every experiment runs on the one
// calibration of package sim; none has parameters of its own beyond those that the papers name. What an experiment says of
// its differences is worked out from its results, and so changes with them.
package paper
