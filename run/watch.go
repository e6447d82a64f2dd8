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
	var seen, failed os.FileInfo
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := executable(s.o.Command[0])
		stable := same(now, seen)
		seen = now
		// Whoever asked for an upgrade meanwhile was faster.
		if !stable || same(now, failed) || same(now, s.serving()) {
			continue
		}
		s.o.Logger.Info("the executable has changed", "file", s.o.Command[0])
		err := s.Upgrade(ctx)
		if err == nil || ctx.Err() != nil || handover.Retryable(err) {
			continue
		}
		s.o.Logger.Warn("upgrade to the new executable", "error", err)
		failed = now
	}
}

// serving is the executable of the process that serves, as it was at its start.
func (s *Supervisor) serving() os.FileInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active.file
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
