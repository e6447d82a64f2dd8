// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"time"

	"instar/internal/sandbox"
	"instar/quicdemo"
)

// Report is what the demo found.
type Report struct {
	Started time.Time    `json:"started"`
	Options Options      `json:"options"`
	Host    sandbox.Host `json:"host"`
	Runs    []Result     `json:"runs"`
}

// Result is one method under load.
type Result struct {
	Method Method `json:"method"`
	// Interrupted says that the run was ended early: all else is what was measured
	// until then.
	Interrupted bool `json:"interrupted,omitempty"`
	// Upgrades is how many were completed.
	Upgrades int `json:"upgrades"`
	// Result is what the load client saw.
	quicdemo.Result

	// ServerFailures counts server processes that did not end with exit
	// code 0, and upgrades that did not happen.
	ServerFailures int `json:"server_failures"`
	// Problems say what went wrong besides the load's errors.
	Problems []string `json:"problems,omitempty"`
	// Servers are the server processes in their order.
	Servers []Process `json:"servers"`
	// Verdicts are the counters of the data plane at the end, of MethodInstar.
	Verdicts map[string]uint64 `json:"verdicts,omitempty"`

	// Timeline is only for the page.
	Timeline []Sample `json:"-"`
}

// OK says that nothing was lost and every server ended as it should.
func (r *Result) OK() bool {
	return r.Lost() == 0 && r.ServerFailures == 0 && r.Requests > 0
}

// Process is one server process, a generation. Times are seconds from the start of the
// load (negative before it), absent when they did not come.
type Process struct {
	Number   uint32   `json:"generation"`
	PID      int      `json:"pid"`
	Started  float64  `json:"started"`
	Active   *float64 `json:"active,omitempty"`
	Replaced *float64 `json:"replaced,omitempty"`
	Ended    *float64 `json:"ended,omitempty"`
	// ExitCode is -1 when a signal ended it.
	ExitCode *int   `json:"exit_code,omitempty"`
	Requests int64  `json:"requests"`
	Packets  uint64 `json:"packets,omitempty"`
}

// Sample is what happened in one step of the timeline.
type Sample struct {
	// T is the step's begin in seconds from the start of the load.
	T float64 `json:"t"`
	// Requests and Packets are counts of this step, by generation.
	Requests map[uint32]int64  `json:"r,omitempty"`
	Packets  map[uint32]uint64 `json:"p,omitempty"`
	Failures int64             `json:"f,omitempty"`
}

// step is the length of a sample.
const step = 100 * time.Millisecond
