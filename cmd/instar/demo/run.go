// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"instar/internal/sandbox"
)

// SandboxCommand and ServerCommand are the arguments with which the demo starts
// this program again: the command line has to lead them to [Sandbox] and to
// [Server].
const (
	SandboxCommand = "demo-sandbox"
	ServerCommand  = "demo-server"
)

// Hooks connect a run to who started it.
type Hooks struct {
	// Self is the file of this program and the name it gets as argument zero.
	Self [2]string
	// Stderr gets what the sandbox writes there itself: a crash. Default: nowhere.
	Stderr io.Writer
	// Event and Status are called from one goroutine. Default: nothing happens.
	Event  func(Event)
	Status func(Status)
}

// Run starts the sandbox, waits for it and returns its report. Before it
// returns every process it started has ended. It needs root. ctx ends it early:
// the report then comes with ctx's error, and has what was measured so far.
func Run(ctx context.Context, o Options, h Hooks) (Report, error) {
	const purpose = "it makes a network namespace of its own and loads a kernel program there"
	if err := sandbox.Check(purpose); err != nil {
		return Report{}, err
	}
	options, err := json.Marshal(o)
	if err != nil {
		return Report{}, fmt.Errorf("write options: %w", err)
	}
	dir, err := os.MkdirTemp("", "instar-demo-")
	if err != nil {
		return Report{}, &sandbox.EnvironmentError{Text: fmt.Sprintf("temporary folder: %v; TMPDIR can name another", err)}
	}
	// The sandbox mounts a bpffs there in its own namespace, out of our sight.
	defer func() { _ = os.Remove(dir) }()

	var doc *document
	err = sandbox.Run(ctx, sandbox.Command{
		Self:    h.Self,
		Args:    []string{SandboxCommand, dir, string(options)},
		Purpose: purpose,
		Mounts:  true,
		Stderr:  h.Stderr,
	}, func(r io.Reader) (err error) {
		doc, err = receive(r, h)
		return err
	})
	switch {
	case err == nil && doc == nil:
		return Report{}, errors.New("sandbox ended without a report")
	case err != nil && (ctx.Err() == nil || doc == nil):
		return Report{}, err
	}
	return doc.report(), err
}

// receive reads the sandbox's messages until it closes the pipe.
func receive(r io.Reader, h Hooks) (doc *document, err error) {
	var fail *sandbox.Failure
	err = sandbox.Receive(r, func(m message) {
		switch {
		case m.Event != nil && h.Event != nil:
			h.Event(*m.Event)
		case m.Status != nil && h.Status != nil:
			h.Status(*m.Status)
		case m.Report != nil:
			doc = m.Report
		case m.Fail != nil:
			fail = m.Fail
		}
	})
	return doc, cmp.Or(fail.Err(), err)
}
