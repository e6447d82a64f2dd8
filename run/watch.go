// SPDX-License-Identifier: Apache-2.0

package run

import (
	"context"
	"os"
	"os/exec"
	"time"

	"instar/handover"
)

// watchEvery is how often the executable is looked at.
const watchEvery = time.Second

// watch does Options.Watch until ctx ends.
func (s *Supervisor) watch(ctx context.Context) {
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	running := executable(s.o.Command[0])
	seen := running
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := executable(s.o.Command[0])
		stable := same(now, seen)
		seen = now
		if now == nil || !stable || same(now, running) {
			continue
		}
		s.o.Logger.Info("the executable has changed", "file", s.o.Command[0])
		err := s.Upgrade(ctx)
		switch {
		case err == nil:
			running = now
		case ctx.Err() != nil:
			return
		case handover.Retryable(err):
		default:
			s.o.Logger.Warn("upgrade to the new executable", "error", err)
			running = now // not again
		}
	}
}

// executable is the file that a start would execute, nil when there is none.
func executable(command string) os.FileInfo {
	path, err := exec.LookPath(command)
	if err != nil {
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil
	}
	return info
}

func same(a, b os.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}
