// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Sender writes messages, one a line; it may be used from several goroutines.
type Sender struct {
	mu  sync.Mutex
	enc *json.Encoder
}

// NewSender returns a Sender to the command, or to whoever reads w.
func NewSender(w io.Writer) *Sender { return &Sender{enc: json.NewEncoder(w)} }

// Send writes one line. A command that is gone cannot be told anything: the
// sandbox learns of it by a signal, so an error here says nothing new.
func (s *Sender) Send(message any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.enc.Encode(message)
}

// Receive calls each with every message until the sender closes the pipe.
func Receive[M any](r io.Reader, each func(M)) error {
	dec := json.NewDecoder(r)
	for {
		var m M
		if err := dec.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read from sandbox: %w", err)
		}
		each(m)
	}
}

// Failure is an error that ends a demonstration before there is a report.
type Failure struct {
	Text string `json:"text"`
	// Environment says that the machine lacks something.
	Environment bool `json:"environment,omitempty"`
}

// FailureOf is how err is sent.
func FailureOf(err error) *Failure {
	_, environment := errors.AsType[*EnvironmentError](err)
	return &Failure{Text: err.Error(), Environment: environment}
}

// Err is the error that was sent; nil for none.
func (f *Failure) Err() error {
	switch {
	case f == nil:
		return nil
	case f.Environment:
		return &EnvironmentError{f.Text}
	}
	return errors.New(f.Text)
}
