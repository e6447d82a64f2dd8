// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// Names of the programs and of the map of AnswerSpec. Values of the map are Tracked.Owner.
const (
	Answer4    = answerProgAnswer4
	Answer6    = answerProgAnswer6
	MapWorkers = answerMapWorkers
)

// AnswerSpec returns the programs that see what a control group's sockets send, and remember
// the flows of workers that answer (LearningAnswered). Its maps MapFlows, MapVerdicts and
// MapControl are to be replaced by the group's; the flow table has so many entries there.
// Minimum kernel: 5.7 (links of control groups); loading needs CAP_BPF and CAP_NET_ADMIN.
func AnswerSpec(flowEntries int, timeout uint16) (*ebpf.CollectionSpec, error) {
	spec, err := loadAnswer()
	if err != nil {
		return nil, fmt.Errorf("read programs of answers: %w", err)
	}
	spec.Maps[MapFlows].MaxEntries = uint32(flowEntries)
	if err := spec.Variables[answerVarFlowTimeoutNs].Set(uint64(timeout) * 1e9); err != nil {
		return nil, fmt.Errorf("set constant %s: %w", answerVarFlowTimeoutNs, err)
	}
	return spec, nil
}
