// SPDX-License-Identifier: Apache-2.0

package connid

import "fmt"

// Handle names one socket of a group: the slot of its generation in the upper
// eight bits, the worker in the lower eight.
type Handle uint16

// MakeHandle returns the handle of a worker of the generation in slot.
func MakeHandle(slot, worker uint8) Handle { return Handle(slot)<<8 | Handle(worker) }

// Slot is the slot of the socket's generation.
func (h Handle) Slot() uint8 { return uint8(h >> 8) }

// Worker is the number of the socket within its generation.
func (h Handle) Worker() uint8 { return uint8(h) }

// String is slot/worker in decimal.
func (h Handle) String() string { return fmt.Sprintf("%d/%d", h.Slot(), h.Worker()) }
