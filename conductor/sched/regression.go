package sched

import "math"

// regression fits a time to the sum of a few parts of it, each of which it multiplies by a factor that it learns: all 1 at
// first, the parts being what the costs say. It is a recursive least squares with forgetting, of relative errors, since
// short and long times are to be predicted alike.
//
// One wild measurement moves it little: an error counts up to a few times the usual one. When all errors are large, so is
// the usual one, and it follows within some tens of measurements.
type regression struct {
	Factors [3]float64    `json:"factors"`
	P       [3][3]float64 `json:"covariance"`
	Usual   float64       `json:"usual_error"` // relative, a moving average
	Seen    uint64        `json:"seen"`
}

const (
	forgetting  = 0.995 // of a measurement at each later one: some 200 count
	uncertainty = 100.0 // the covariance's diagonal at first, and at most: a direction that is never seen does not wind up
	mostFactor  = 100.0
	leastError  = 0.1 // relative; that much is never too wild
	wild        = 3   // usual errors
	errorPace   = 0.05
)

func newRegression() regression {
	r := regression{Factors: [3]float64{1, 1, 1}, Usual: leastError}
	r.forgetAll()
	return r
}

func (r *regression) forgetAll() {
	r.P = [3][3]float64{}
	for i := range r.P {
		r.P[i][i] = uncertainty
	}
}

func (r *regression) predict(x [3]float64) float64 {
	return r.Factors[0]*x[0] + r.Factors[1]*x[1] + r.Factors[2]*x[2]
}

// learn takes a measurement of the time whose parts are x. One that cannot be is ignored.
func (r *regression) learn(x [3]float64, took float64) {
	whole := max(r.predict(x), (x[0]+x[1]+x[2])/mostFactor)
	if !(took > 0) || !(whole > 0) || math.IsInf(whole, 1) || math.IsInf(took, 1) {
		return
	}
	for i := range x {
		x[i] /= whole
	}
	bound := max(leastError, wild*r.Usual)
	miss := max(-bound, min(bound, took/whole-r.predict(x)))
	r.Usual += errorPace * (math.Abs(miss) - r.Usual)
	r.Seen++
	r.update(x, miss)
}

// update is the step of the recursive least squares.
func (r *regression) update(x [3]float64, miss float64) {
	var px, gain [3]float64
	scale := forgetting
	for i := range px {
		px[i] = r.P[i][0]*x[0] + r.P[i][1]*x[1] + r.P[i][2]*x[2]
		scale += x[i] * px[i]
	}
	for i := range gain {
		gain[i] = px[i] / scale
		r.Factors[i] = max(0, min(mostFactor, r.Factors[i]+gain[i]*miss))
	}
	for i := range r.P {
		for j := range r.P {
			r.P[i][j] = (r.P[i][j] - (gain[i]*px[j]+gain[j]*px[i])/2) / forgetting // symmetric in spite of rounding
		}
	}
	for i := range r.P {
		if r.P[i][i] <= uncertainty {
			continue
		}
		shrink := math.Sqrt(uncertainty / r.P[i][i]) // of the row and the column, so that it stays a covariance
		for j := range r.P {
			r.P[i][j] *= shrink
			r.P[j][i] *= shrink
		}
	}
	if !r.sane() {
		r.forgetAll()
	}
}

// sane reports whether all figures can be.
func (r *regression) sane() bool {
	for i := range r.P {
		if !(r.Factors[i] >= 0) || r.Factors[i] > mostFactor || !(r.P[i][i] >= 0) || r.P[i][i] > uncertainty*1.001 {
			return false
		}
		for j := range r.P {
			if !(math.Abs(r.P[i][j]) <= uncertainty*1.001) {
				return false
			}
		}
	}
	return r.Usual >= 0 && !math.IsInf(r.Usual, 1)
}
