package sched

import "time"

// InstanceID names an instance of a scheduler. Once an instance is removed its id may be given to another.
type InstanceID int32

// What is not an instance.
const (
	NoInstance InstanceID = -1
	FromPool   InstanceID = -2 // where a prefix comes from: the shared pool
)

// Instance is one that serves.
type Instance struct {
	Name       string  // for people; not looked at
	Role       Role    // Both if 0
	Bandwidth  float64 // of its NIC, in bytes a second each way; 0: transfers take no time
	KVCapacity int     // tokens that the memory for decoding holds; 0: no bound
	MaxBatch   int     // sequences that it decodes together; 0: no bound
}

// Match is the prefix of a prompt that an instance holds.
type Match struct {
	Instance InstanceID
	Tokens   int
	// Lasting is in how much time the prefix is expected to have been evicted, from its end to its beginning; 0: it stays.
	// What will be gone before it can be used is not counted on.
	Lasting time.Duration
}

// Request is a prompt that wants to be served.
type Request struct {
	ID            uint64 // one that is still remembered is forgotten first
	Class         string
	Priority      int     // 1 to 7; 0: that of its class
	Input         int     // tokens of the prompt
	Output        int     // a hint how many tokens it will be answered with; 0: unknown
	Matches       []Match // instances that hold a prefix; the others hold none. At most one each: the last counts
	Pool          int     // tokens of its prefix that lie in the shared pool, from which any instance can load them
	BytesPerToken int     // of KV; 0: the model's
}

// Reason is why a request was rejected, a word for programs; [Decision.Explain] has a sentence for people.
type Reason string

// The reasons. Each but the last two is a matter of load or of what is running: trying again later may help.
const (
	Accepted        Reason = ""
	ReasonTTFT      Reason = "ttft"        // the first token would come too late
	ReasonTBT       Reason = "tbt"         // a decode instance has no place at which tokens come fast enough
	ReasonLoad      Reason = "decode-load" // decoding would be too slow by the time that prefill is through
	ReasonFull      Reason = "decode-full" // no decode instance has room in its KV memory or batch
	ReasonNoPrefill Reason = "no-prefill"  // there is no prefill instance
	ReasonNoDecode  Reason = "no-decode"   // there is no decode instance
	ReasonBusy      Reason = "too-many"    // as many requests as Config.MaxRequests are being served
	ReasonUnknown   Reason = "unknown"     // the request is not, or no longer, remembered
	ReasonTooLong   Reason = "too-long"    // no decode instance's memory could ever hold it
	ReasonInvalid   Reason = "invalid"     // it has no tokens, or more than can be
)

// Stage is where a request was rejected.
type Stage uint8

// The stages.
const (
	Admitted Stage = iota
	AtPrefill
	AtDecode
)

// Replication is a copy of a prefix to be made, the last step of Algorithm 1; none if Tokens is 0.
type Replication struct {
	From, To InstanceID
	Tokens   int // those that To does not have
}

// Decision says where a request is served, or why it is not. Times are predictions; TTFT is the sum of its three parts.
type Decision struct {
	Accepted bool
	Reason   Reason
	Stage    Stage

	Prefill, Decode InstanceID // NoInstance if none was found
	PrefixLen       int        // tokens that need not be computed: what the prefill instance has and what it fetches
	TransferFrom    InstanceID // what its prefill waits for: a peer's prefix, the pool's with FromPool, or NoInstance
	TransferLen     int        // tokens
	// Replicate is a copy that the caller has made. If TransferFrom is its source this is the same copy, not a second one;
	// else nobody waits for it.
	Replicate Replication

	TTFT, Queue, Transfer, Execution time.Duration
	TBT                              time.Duration // as Config.TBTLimit measures it
	TBTs                             TBT           // by both measures
	Load                             float64       // expected of decoding over its limit, as the mode of overload control sees it
	Limits                           Limits        // that were held against it, less the headroom for higher priorities
}
