package member

import "context"

// Registry is this process's place in its job: what it announces, and what it knows of others. Its methods may be called
// concurrently.
type Registry struct{}

// NewRegistry announces this process. While another one of the same rank is alive it waits; the error is a [*TakenError] if that is
// so until ctx ends.
func NewRegistry(ctx context.Context, cfg RegistryConfig) (*Registry, error) { return nil, nil }

// Announce announces this process anew after its lease was lost.
func (r *Registry) Announce(ctx context.Context) error { return nil }

// Processes are those who are announced, this one among them, by rank.
func (r *Registry) Processes() []Process { return nil }

// Find is a process as it has announced itself; it waits for one that has not yet.
func (r *Registry) Find(ctx context.Context, rank int, incarnation uint64) (Process, error) {
	return Process{}, nil
}

// Linked tells all groups that this process has a connection to another one, given by its global rank.
func (r *Registry) Linked(rank int, incarnation uint64) {}

// Suspect tells all groups that this process has lost its connection to another one, or has found it dead.
func (r *Registry) Suspect(rank int, incarnation uint64, why error) {}

// Close withdraws the announcement. Close groups first.
func (r *Registry) Close() error { return nil }
