// SPDX-License-Identifier: Apache-2.0

package dispatch

import "time"

// testStep is called between the steps of a change, with the one that was just
// done. It is nil but in tests, which end or hold the process there.
var testStep func(done string)

func step(done string) {
	if testStep != nil {
		testStep(done)
	}
}

// Limits that tests change.
var (
	// lockWait is how long a writer waits for another one. Every transaction
	// takes milliseconds.
	lockWait = 10 * time.Second
	// guardEvery is how often a process that has joined looks whether the active
	// generation still lives.
	guardEvery = 250 * time.Millisecond
	// unreadLimit is how long a queue may stay as it is before the owner is held
	// not to read it.
	unreadLimit = 5 * time.Second
)
