package member

import "time"

const (
	// ReportWindow bounds how long members wait for each other's word on a suspect.
	ReportWindow = 500 * time.Millisecond
	// AdmitTimeout bounds how long Activate waits for those who are to be members: as the original does.
	AdmitTimeout = 20 * time.Second
)
